"""Fixtures of the doors that `doors.md` lists."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.checkouts import checkout as new_checkout
from tests.commands import ROOT, invoke


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended: its exit code, both streams, and the files that it left in its folder."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def data(self) -> Any:
        """The JSON on stdout."""
        return json.loads(self.stdout)


class Command(Protocol):
    """Run `invoke` with these words in a project, by default this one; `{out}` in a word is the folder."""

    def __call__(self, *words: str, root: Path = ROOT, **variables: str) -> Ended: ...


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """A command of twinrun, run in this process."""

    def run(*words: str, root: Path = ROOT, **variables: str) -> Ended:
        folder = tmp_path / "out"
        folder.mkdir(exist_ok=True)
        done = invoke(root, *(word.replace("{out}", str(folder)) for word in words), variables=variables)
        return Ended(code=done.returncode, stdout=done.stdout, stderr=done.stderr, folder=folder)

    return run


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., Path]:
    """A checkout with the recipes that are named, which a test may change and commands may run in."""

    def make(*recipes: str) -> Path:
        root = new_checkout(tmp_path, *recipes)
        shutil.copy(ROOT / "tasks.py", root)
        return root

    return make
