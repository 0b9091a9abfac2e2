"""What somebody does to a place on purpose: the command names it, at once, and waits for nothing."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.checkpoints.writing import place_of
from twinrun.checkpoints.folder import FolderStore
from twinrun.cli.records import checkpoint

FILE = "step-00000004/rank-00000.safetensors"
MANIFEST = "step-00000004/manifest.json"
NEWEST = "step-00000006"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return Path(place_of(tmp_path / "place").place)


def verified(place: Path) -> dict[int | str, str]:
    """Return what `invoke checkpoint verify` says is wrong, by step or name."""
    found = checkpoint("verify", place)
    rows = cast("list[dict[str, Any]]", found.data)
    wrong = {row["step"]: row["damage"] for row in rows if row["damage"]}
    assert found.code == (4 if wrong else 0)
    return wrong


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def bound(path: Path) -> None:
    path.unlink()
    # The name of a socket has 108 characters at most.
    before = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(before)


def outside(path: Path) -> None:
    moved = path.rename(path.parent.parent.parent / "outside")
    path.symlink_to(moved)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def vast(path: Path) -> None:
    os.truncate(path, 20 << 30)


@pytest.mark.parametrize(
    ("name", "attack", "said"),
    [
        (FILE, pipe, "found: a pipe"),
        (FILE, bound, "found: a socket"),
        (FILE, outside, "found: a link"),
        (FILE, device, "found: a link"),
        (FILE, vast, "found: 21474836480 bytes"),
        (MANIFEST, pipe, "found: a pipe"),
        (MANIFEST, outside, "found: a link"),
        (MANIFEST, vast, "found: 21474836480 bytes, at most"),
        ("step-00000004/extra", pipe, "found: a pipe"),
        ("step-00000004/extra", Path.touch, "a file that the manifest does not have"),
        ("step-00000004/extra", Path.mkdir, "found: a folder"),
    ],
)
def test_what_is_no_file_of_a_checkpoint_is_named(
    place: Path, name: str, attack: Callable[[Path], object], said: str
) -> None:
    attack(place / name)
    wrong = verified(place)
    assert list(wrong) == [4]
    assert f"{place / name}: " in wrong[4]
    assert said in wrong[4]


@pytest.mark.parametrize("name", ["step-٠٠٠٠٠٠٠٢", "step-000000002", "step-2", "step-00000004 "])
def test_a_name_that_no_checkpoint_has_is_named_and_not_used(place: Path, name: str) -> None:
    (place / name).mkdir()
    assert "no name of a checkpoint" in verified(place)[name]
    assert FolderStore(place).steps() == [2, 4, 6]


def test_the_newest_checkpoint_of_another_run_is_named(place: Path, tmp_path: Path) -> None:
    other = Path(place_of(tmp_path / "other", seed="18").place)
    shutil.rmtree(place / NEWEST)
    shutil.copytree(other / NEWEST, place / NEWEST)
    assert "another manifest than was published" in verified(place)[6]
