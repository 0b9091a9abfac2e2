"""The fixture of the door that `doors.md` lists first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.commands import ROOT, invoke


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit code and both streams."""

    code: int
    stdout: str
    stderr: str

    @property
    def data(self) -> Any:
        """The JSON on stdout."""
        return json.loads(self.stdout)


class Command(Protocol):
    """Run `invoke` with these words in a project, by default this one."""

    def __call__(self, *words: str, root: Path = ROOT, **variables: str) -> Ended: ...


@pytest.fixture
def command() -> Command:
    """A command of twinrun, run in this process."""

    def run(*words: str, root: Path = ROOT, **variables: str) -> Ended:
        done = invoke(root, *words, variables=variables)
        return Ended(done.returncode, done.stdout, done.stderr)

    return run
