"""The fixtures of the doors, through which other tests look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.commands import ROOT
from tests.doors import Command


def test_a_command_has_exit_code_streams_and_files(command: Command) -> None:
    wrong = command("run", "recipes/no-such-recipe")
    assert (wrong.code, wrong.stdout, wrong.files) == (2, "", {})
    assert "no-such-recipe" in wrong.stderr
    listed = command("recipes", "--json")
    assert listed.code == 0
    assert listed.data


def test_a_checkout_may_be_changed(command: Command, checkout: Callable[..., Path]) -> None:
    root = checkout("rmsnorm")
    manifest = root / "recipes" / "rmsnorm" / "recipe.toml"
    manifest.write_text("nonsense = 1\n" + manifest.read_text("utf-8"), encoding="utf-8")
    ended = command("run", "recipes/rmsnorm", "--dry", root=root)
    assert ended.code == 2
    assert "nonsense" in ended.stderr


def test_a_record_reads_the_same_by_path_and_by_name(judged: Callable[..., Any], library: ModuleType) -> None:
    path = min(ROOT.glob("recipes/*/results/*.json"))
    record = judged(path.parents[1].name, path.name)
    assert record == judged(path) == library.read(path)


def test_a_golden_file_holds_a_text(golden: Callable[[str, Any], None]) -> None:
    with pytest.raises((AssertionError, FileNotFoundError)):
        golden("no_such_golden.txt", "text")
