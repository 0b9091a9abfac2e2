"""No room is above its figure in `rooms.toml`, and no figure above the one that landed last."""

from __future__ import annotations

import subprocess

import pytest

from tests.contracts.tree import ROOT
from tools import size


def test_no_room_is_above_its_figure() -> None:
    found, kept = size.figures(ROOT), size.kept(ROOT)["figures"]
    assert kept.keys() == found.keys(), "`nox -s size` writes the figures"
    assert not size.raised(found, kept)


def test_no_figure_and_no_aim_is_above_the_landed_one() -> None:
    landed, kept = size.landed(ROOT), size.kept(ROOT)
    assert "HEAD" in landed, f"HEAD has no {size.FILE}"
    for commit, tables in landed.items():
        assert not size.raised(kept["figures"], tables.get("figures", {}), trade=True), commit
        assert not size.raised(kept["aims"], tables.get("aims", {})), commit
    if "HEAD^" not in landed and (ROOT / _git("rev-parse", "--git-path", "shallow")).is_file():
        pytest.skip("a shallow clone has no earlier commit; `git fetch --deepen 1` brings it")


def test_code_is_neither_blank_nor_comment_nor_docstring() -> None:
    module = '"""A module.\n\nOf three lines."""\n\n# A comment.\nX = (\n    1,  # one\n)\n\n'
    fields = 'class A:\n    """One."""\n\n    x: int\n    """A field."""\n'
    assert size.code_lines(module + fields) == 5


def test_inner_names_are_counted_and_doors_are_not() -> None:
    doors = "import twinrun\nfrom twinrun import api\nfrom twinrun.api import read, judge\n"
    assert size.inner_names(doors) == 0
    assert size.inner_names(doors + "from twinrun import cli\nfrom twinrun.results.judge import a, b\n") == 3


def test_rooms_may_trade_while_their_sum_falls() -> None:
    before = {"src": 10, "src/a": 4, "src/b": 6}
    assert not size.raised({"src": 9, "src/a": 5, "src/b": 4}, before, trade=True)
    assert size.raised({"src": 9, "src/a": 5, "src/b": 4}, before) == [
        "src/a: 5 above the 4 of the last landed commit"
    ]
    assert size.raised({"src": 10, "src/a": 5, "src/b": 5}, before, trade=True)


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
