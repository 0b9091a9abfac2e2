"""Runs of one state of a path, and the number that each gives: of a recipe, or of any command."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from uv import find_uv_bin

from twinrun.foundation.cache import COMPLETE
from twinrun.foundation.errors import InputError, RunInterruptedError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.processes import LocalProcess, end_of, last_lines
from twinrun.foundation.redaction import redacted
from twinrun.history.path import LOCK, STACKS, Packages, digest_of
from twinrun.manifests.locks import python_lock_text
from twinrun.manifests.stack import stamp
from twinrun.planning.project import Project
from twinrun.report.words import standing_for
from twinrun.results.judged import Judged
from twinrun.results.parity import METRIC
from twinrun.results.reading import read_record
from twinrun.runs.selection import Request
from twinrun.workloads.curve_distance import largest_difference, values_of

_POLL_SECONDS = 0.1
# What `run` ends with: a claim that fails is measured too, and a run that was told to end is none.
_MEASURED, _FAILED, _STOPPED = (0, 1), 4, (5, 130, 143)
# Status of a command whose environment cannot be installed: no process ends so.
_UNINSTALLED = 256


class RunQuestion(Frozen):
    """Which number of a run is asked for."""

    kind: Literal["metric", "fails", "parity"]
    point: str | None = None
    """Null: the only point that has the number."""
    metric: str | None = None
    """Row of metrics.toml, or a measurement by its name; null: the first that stands for the workload."""
    number: str | None = None
    """Of a command, the regular expression whose last match, or group of it, is the number."""


class StateRun(Frozen):
    """One run, as bisect.json lists it."""

    state: str
    """Digest of the state."""
    position: str
    """The state in words."""
    purpose: str
    outcome: Literal["measured", "failed", "refused"]
    """`failed`: what ran ended with an error. `refused`: nothing installs, or no number came."""
    value: float | None = None
    detail: str = ""
    record: str | None = None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StateRunner(ABC):
    """Runs states in a folder of its own."""

    subject: str
    """What runs: a recipe, or a command."""
    question: RunQuestion
    folder: Path
    say: Callable[[str], None]

    def run(self, state: Packages, *, position: str, purpose: str) -> StateRun:
        """Run a state once.

        Raises:
            RunInterruptedError: the run was told to end.
        """
        digest = digest_of(state)
        log = self.folder / "log" / f"{len(list((self.folder / 'log').glob('*.log'))) + 1:04}-{digest}.log"
        out = self.folder / "runs" / log.stem
        shutil.rmtree(out, ignore_errors=True)
        began = time.monotonic()
        status = self._start(state, out, log)
        seconds = round(time.monotonic() - began, 3)
        if status in _STOPPED:
            raise RunInterruptedError("stopped", place=position, hint="the same command goes on from here")
        found = self._read(status, out, log)
        if found["outcome"] != "measured":
            found = {"detail": redacted(last_lines(end_of(log), 8).strip())} | found
        return StateRun(state=digest, position=position, purpose=purpose, seconds=seconds, **found)

    @abstractmethod
    def _start(self, state: Packages, out: Path, log: Path) -> int:
        """Install and run a state; return its exit status."""

    @abstractmethod
    def _read(self, status: int, out: Path, log: Path) -> dict[str, Any]:
        """Return what became of a run: outcome, value, and more of a `StateRun`."""


@dataclass(frozen=True, kw_only=True)
class RecipeRunner(StateRunner):
    """Runs a recipe in a checkout whose stack has the lock of the state."""

    project: Project
    request: Request
    stack: str
    """Folder of images/stacks whose lock each state replaces."""

    def _start(self, state: Packages, out: Path, log: Path) -> int:
        asked, root = self.request, self._checkout(state)
        command = [
            *(sys.executable, "-m", "twinrun", "run", f"recipes/{Path(asked.recipe).name}"),
            *("--stack", self.stack, "--engine", "venv", "--out", str(out), "--json", "--yes"),
            *(f"--vendor={asked.vendor}", f"--scale={asked.scale}"),
            *(f"--set={one}" for one in asked.set),
        ]
        return _ended(command, {"PYTHONPATH": str(root / "src")}, root, log)

    def _read(self, status: int, out: Path, _log: Path) -> dict[str, Any]:
        file = next(out.glob("*/*/record.json"), None)
        if status not in _MEASURED or file is None:
            return {"outcome": "failed" if status == _FAILED else "refused"}
        record = read_record(file, self.project)
        value = 0.0
        if self.question.kind != "fails":
            value = (self._apart if self.question.kind == "parity" else self._asked)(record)
        return {"outcome": "measured", "value": value, "record": str(file.relative_to(self.folder))}

    def _asked(self, record: Judged) -> float:
        """Return the median of the measurement that is asked for; raises InputError for none or several."""
        asked = self.question
        points = [point for point in record.points if asked.point in (None, point.id)]
        for name in [asked.metric] if asked.metric else record.workload.headline:
            exact = [(point, one) for point in points if (one := point.measurement(name))]
            found = exact or [(point, one) for point in points for one in standing_for(point, name)]
            if len(found) > 1:
                raise _expected_one(f"{point.id}: {one.id}" for point, one in found)
            if found:
                return found[0][1].median
        raise _expected_one(f"{point.id}: {one.metric}" for point in points for one in point.measurements)

    def _apart(self, record: Judged) -> float:
        """Return 1 where the loss curve is further from that of the first good run than claims allow."""
        having = [one for one in record.points if values_of(one, METRIC)]
        points = [one for one in having if self.question.point in (None, one.id)]
        if len(points) != 1:
            raise _expected_one(one.id for one in having)
        (point,) = points
        arithmetic = record.terms(point).curves[METRIC].arithmetic
        claims = self.project.recipe(record.plan.recipe).published.claim
        bounds = [one.bounds.get(arithmetic, math.inf) for one in claims if one.metric == METRIC]
        bounds.append(self.project.metrics[METRIC].evidence.bounds.get(arithmetic, math.inf))
        if not math.isfinite(bound := min(bounds)):
            raise InputError("no bound for this arithmetic", place="--parity", found=arithmetic)
        first = min(self.folder.glob("runs/*/*/*/record.json"))
        other = read_record(first, self.project).point(point.id)
        distance, _ = largest_difference([values_of(one, METRIC) for one in (point, other) if one])
        return float(not distance <= bound)

    def _checkout(self, state: Packages) -> Path:
        """Return the checkout of a state: its stack has the state's lock, all else is as it was."""
        root, base = self.folder / "states" / digest_of(state), self.project.root
        stack = root / STACKS / self.stack
        if (stack / LOCK).is_file():
            return root
        shutil.rmtree(root, ignore_errors=True)
        # A checkout has these of its own, the rest are links.
        shutil.copytree(base / STACKS / self.stack, stack, ignore=shutil.ignore_patterns(LOCK))
        own = {"images", "runs", "stacks", self.stack}
        for folder in ("", "images", STACKS):
            for path in sorted((base / folder).iterdir()):
                if path.name not in own and not path.name.startswith("."):
                    (root / folder / path.name).symlink_to(path.resolve())
        write_atomically(stack / LOCK, lock_text(state, stamp(stack / "requirements.in")))
        return root


@dataclass(frozen=True, kw_only=True)
class CommandRunner(StateRunner):
    """Runs a command where the environment of the state comes first on the path."""

    words: tuple[str, ...]

    def _start(self, state: Packages, _out: Path, log: Path) -> int:
        folder, here = self.folder / "environments" / digest_of(state), Path.cwd()
        if not (folder / COMPLETE).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            lock = folder.with_suffix(".lock")
            write_atomically(lock, lock_text(state, "# A state of a bisection."))
            uv = os.fspath(find_uv_bin())
            install = [uv, "pip", "sync", "--require-hashes", "--link-mode", "hardlink"]
            install += ["--python", str(folder), str(lock)]
            for command in ([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], install):
                if _ended(command, {}, here, log):
                    return _UNINSTALLED
            write_atomically(folder / COMPLETE, "")
        path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)])
        found = shutil.which(self.words[0], path=path) or self.words[0]
        return _ended([found, *self.words[1:]], {"PATH": path, "VIRTUAL_ENV": str(folder)}, here, log)

    def _read(self, status: int, _out: Path, log: Path) -> dict[str, Any]:
        if status:
            return {"outcome": "refused" if status == _UNINSTALLED else "failed"}
        if self.question.number is None:
            return {"outcome": "measured", "value": 0.0}
        with log.open(encoding="utf-8", errors="replace") as lines:
            matches = [found for line in lines if (found := re.search(self.question.number, line))]
        try:
            return {"outcome": "measured", "value": float(matches[-1][matches[-1].re.groups and 1])}
        except (IndexError, TypeError, ValueError):
            detail = f"no line has a number as --number {self.question.number} asks for"
            return {"outcome": "refused", "detail": detail}


def _ended(command: list[str], variables: Mapping[str, str], folder: Path, log: Path) -> int:
    """Run a command to its end and return its status; where we are stopped, it is too."""
    process = LocalProcess(command, variables=variables, folder=folder, log=log)
    try:
        while (status := process.poll()) is None:
            time.sleep(_POLL_SECONDS)
        return status
    finally:
        if process.poll() is None:
            process.stop()


def lock_text(state: Packages, first: str) -> str:
    """Return the lock of a state."""
    return python_lock_text(first, {pin: one[pin] for _, one in sorted(state.items()) for pin in one})


def _expected_one(known: Iterable[str]) -> InputError:
    place, allowed = "--point or --metric", sorted(set(known))
    return InputError("expected one number a run", place=place, found="several, or none", allowed=allowed)
