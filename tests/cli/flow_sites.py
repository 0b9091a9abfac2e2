"""Checkouts with one recipe each, whose ranks an engine plays."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkouts import checkout
from tests.cli.played_ranks import PLAYED, Job
from tests.execution.fake_engine import NAME, Play, Script, register
from twinrun.cli.run import run
from twinrun.foundation.errors import MachineError
from twinrun.planning.project import Project
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record
from twinrun.runs.selection import Request

RECIPE = "my-recipe"
REFUSED = MachineError("no such device", place="here")


@dataclass
class FlowSite:
    """A checkout with one recipe, and the engine that plays its ranks."""

    root: Path
    out: Path
    script: Script
    workload: str

    def invoke(self, *settings: str, resume: bool = False, track: str = "", **asked: Any) -> int:
        """Run the recipe at smoke scale and return the exit code; `asked`: more options."""
        with contextlib.chdir(self.root):
            request = Request(vendor="cpu", engine=NAME, scale="smoke", set=settings)
            own = {name: asked.pop(name) for name in vars(request).keys() & asked}
            options: dict[str, Any] = {"out": self.out, "track": track, "resume": resume} | asked
            found = run(RECIPE, request=replace(request, **own), **options)
            return found.show(as_json=True)

    def folders(self) -> list[Path]:
        """Return the run folders, oldest first."""
        return sorted((self.out / RECIPE).glob("*"))

    def record(self) -> Judged:
        """Return the record of the only run."""
        (folder,) = self.folders()
        return read_record(folder / "record.json", Project(self.root))

    def play(self, job: Job) -> Play:
        """Return what ranks do when nothing is wrong."""
        return PLAYED[self.workload](job)


def made(folder: Path, workload: str, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> FlowSite:
    monkeypatch.setenv("TWINRUN_CACHE", str(folder / "cache"))
    root = checkout(folder)
    shutil.copytree(recipe, root / "recipes" / RECIPE)
    script = Script(play=PLAYED[workload])
    register(script, monkeypatch)
    return FlowSite(root=root, out=folder / "runs", script=script, workload=workload)
