"""Runs of one state of a path: a checkout with its lock, `invoke run` in it, and the number of its record."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from twinrun.foundation.cache import COMPLETE, environment_folder
from twinrun.foundation.errors import InputError, RunError, RunInterruptedError
from twinrun.foundation.files import canonical_json, parse_json, sha256_of_file, write_atomically
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.processes import LocalProcess, end_of, last_lines
from twinrun.foundation.redaction import redacted
from twinrun.history.path import RunState
from twinrun.history.sides import LOCK, STACKS
from twinrun.manifests.locks import python_lock_text
from twinrun.manifests.stack import pins, stamp
from twinrun.planning.project import Project
from twinrun.report.summary import standing_for
from twinrun.results.judged import Judged
from twinrun.results.parity import METRIC
from twinrun.results.reading import read_record
from twinrun.runs.selection import Request
from twinrun.workloads.curve_distance import largest_difference, values_of
from twinrun.workloads.workload import MeasuredPoint

KEPT = 6
"""Environments that a bisection made and keeps beside those of its ends."""
MEASURED, CLAIM_FAILED, FAILED, STOPPED = 0, 1, 4, (5, 130, 143)
_POLL_SECONDS = 0.1
# A state's checkout has these of its own; the rest are links to the checkout that it is made of.
_OWN = {"images", "runs", ".git", "tasks.py"}


class RunQuestion(Frozen):
    """Which number of a run is asked for."""

    kind: Literal["metric", "fails", "parity"]
    point: str | None = None
    """Null: the only point that has the number."""
    metric: str | None = None
    """Row of metrics.toml, or a measurement by its name; null: the first that stands for the workload."""


class StateRun(Frozen):
    """One run, as bisect.json lists it."""

    state: str
    """Digest of the state."""
    position: str
    """The state in words."""
    purpose: str
    outcome: Literal["measured", "failed", "refused"]
    """`failed`: ranks ended with an error. `refused`: nothing ran, for example since nothing installs."""
    value: float | None = None
    detail: str = ""
    run: str | None = None
    """Identifier of the run."""
    record: str | None = None
    record_sha256: str | None = None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StateRunner:
    """Runs states of one recipe in a folder of its own."""

    project: Project
    request: Request
    stack: str
    """Folder of images/stacks whose lock each state replaces."""
    question: RunQuestion
    folder: Path
    say: Callable[[str], None]
    unset: tuple[str, ...] = ()
    """Variables that a state without them takes out of the shell's."""
    _reference: list[Judged] = field(default_factory=list)

    def run(self, state: RunState, *, position: str, purpose: str) -> StateRun:
        """Run a state once.

        Raises:
            RunInterruptedError: the run was told to end.
        """
        root = self._checkout(state)
        number = len(list((self.folder / "log").glob("*.log"))) + 1
        log = self.folder / "log" / f"{number:04}-{state.digest()}.log"
        began = time.monotonic()
        out = self.folder / "runs" / log.stem
        status = self._start(root, state, out=out, log=log)
        seconds = round(time.monotonic() - began, 3)
        common: dict[str, Any] = {
            "state": state.digest(),
            "position": position,
            "purpose": purpose,
            "seconds": seconds,
        }
        if status in STOPPED:
            raise RunInterruptedError("stopped", place=position, hint="the same command goes on from here")
        self._prune(root)
        if status not in (MEASURED, CLAIM_FAILED):
            outcome: Literal["failed", "refused"] = "failed" if status == FAILED else "refused"
            said = last_lines(end_of(log), 8)
            return StateRun(**common, outcome=outcome, detail=redacted(said.strip()))
        (file,) = out.glob("*/*/record.json")
        record = read_record(file, self.project)
        return StateRun(
            **common,
            outcome="measured",
            value=self.value(record),
            run=record.run,
            record=str(file.relative_to(self.folder)),
            record_sha256=record.record.sha256,
        )

    def value(self, record: Judged) -> float:
        """Return the number that is asked of a record; raises InputError where it has none."""
        if self.question.kind == "fails":
            return 0.0
        if self.question.kind == "parity":
            return self._apart(record)
        return asked_value(record, self.question)

    def remember(self, done: StateRun) -> None:
        """Take the first good run as what curves are held against."""
        if done.record and not self._reference:
            self._reference.append(read_record(self.folder / done.record, self.project))

    def _apart(self, record: Judged) -> float:
        """Return 1 where the loss curve is further from that of the first good run than claims allow."""
        point = _point(record, self.question, lambda one: bool(values_of(one, METRIC)))
        traced = record.terms(point).curves[METRIC]
        claims = self.project.recipe(record.plan.recipe).published.claim
        bounds = [one.bounds.get(traced.arithmetic, math.inf) for one in claims if one.metric == METRIC]
        bounds.append(self.project.metrics[METRIC].evidence.bounds.get(traced.arithmetic, math.inf))
        if not math.isfinite(bound := min(bounds)):
            raise InputError("no bound for this arithmetic", place="--parity", found=traced.arithmetic)
        reference = self._reference[0] if self._reference else record
        other = reference.point(point.id)
        curves = [values_of(one, METRIC) for one in (point, other) if one]
        distance, _ = largest_difference(curves)
        return float(not distance <= bound)

    def _start(self, root: Path, state: RunState, *, out: Path, log: Path) -> int:
        shutil.rmtree(out, ignore_errors=True)
        asked = self.request
        options = [f"--set={one}" for one in asked.set]
        options += ["--vendor", asked.vendor] if asked.vendor else []
        options += ["--scale", asked.scale] if asked.scale else []
        absent = [name for name in self.unset if name not in (state.variables or {})]
        command = [
            *(["env", *(word for name in absent for word in ("-u", name))] if absent else []),
            *(sys.executable, "-m", "invoke", "run", f"recipes/{Path(asked.recipe).name}"),
            *("--stack", self.stack, "--engine", "venv", "--out", str(out), "--json", "--yes", *options),
        ]
        variables = {"PYTHONPATH": str(root / "src"), **(state.variables or {})}
        process = LocalProcess(command, variables=variables, folder=root, log=log)
        try:
            while (status := process.poll()) is None:
                time.sleep(_POLL_SECONDS)
            return status
        finally:
            if process.poll() is None:
                process.stop()

    def _checkout(self, state: RunState) -> Path:
        """Return the checkout of a state: its stack has the state's lock, all else is as it was."""
        root = self.folder / "states" / state.digest()
        if (root / "tasks.py").is_file():
            return root
        base = self._base(state.commit)
        stack = root / STACKS / self.stack
        shutil.rmtree(root, ignore_errors=True)
        stack.parent.mkdir(parents=True)
        for folder, own in (("", _OWN), ("images", {"stacks"}), (STACKS, {self.stack})):
            for path in sorted((base / folder).iterdir()):
                if path.name not in own and not path.name.startswith("."):
                    (root / folder / path.name).symlink_to(path.resolve())
        shutil.copytree(base / STACKS / self.stack, stack, symlinks=False)
        direct = pins((stack / "requirements.in").read_text(encoding="utf-8"))
        entries = {name: one for name, one in sorted(state.packages.items()) if one}
        wanted = [pin for name, one in entries.items() if name in direct for pin in one]
        write_atomically(stack / "requirements.in", "".join(f"{pin}\n" for pin in wanted))
        lock = {pin: hashes for one in entries.values() for pin, hashes in one.items()}
        write_atomically(stack / LOCK, python_lock_text(stamp(stack / "requirements.in"), lock))
        # The marker of a whole checkout, and no link: commands work in the folder that it really lies in.
        shutil.copyfile(base / "tasks.py", root / "tasks.py")
        return root

    def _base(self, commit: str | None) -> Path:
        """Return the checkout that a state is made of: this one, or another commit of it."""
        if commit is None:
            return self.project.root
        folder = self.folder / "commits" / commit
        if not folder.is_dir():
            partial = folder.with_name(f".{commit}")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            archive = subprocess.Popen(
                ["git", "-C", str(self.project.root), "archive", commit], stdout=subprocess.PIPE
            )
            assert archive.stdout
            with tarfile.open(fileobj=archive.stdout, mode="r|") as stream:
                stream.extractall(partial, filter="data")
            if archive.wait():
                raise RunError("git has no such commit", place=str(self.project.root), found=commit)
            partial.rename(folder)
        return folder

    def _prune(self, root: Path) -> None:
        """Remove the environments of states that were used longest ago, but for `KEPT`."""
        file = self.folder / "environments.json"
        used: list[str] = parse_json(file.read_bytes()) if file.is_file() else []
        now = str(environment_folder(self.stack, sha256_of_file(root / STACKS / self.stack / LOCK)))
        used = [*(one for one in used if one != now), now]
        for old in used[: -KEPT - 2]:
            shutil.rmtree(old, ignore_errors=True)
        write_atomically(file, canonical_json([one for one in used if (Path(one) / COMPLETE).is_file()]))


def asked_value(record: Judged, question: RunQuestion) -> float:
    """Return the median of the measurement that a question asks for.

    Raises:
        InputError: the record has none, or several.
    """
    wanted = [question.metric] if question.metric else list(record.workload.headline)
    for name in wanted:

        def has(point: MeasuredPoint, name: str = name) -> bool:
            return point.measurement(name) is not None or bool(standing_for(point, name))

        if not any(has(point) for point in record.points):
            continue
        point = _point(record, question, has)
        exact = point.measurement(name)
        found = [exact] if exact else standing_for(point, name)
        if len(found) > 1:
            raise InputError(
                "several measurements of this metric",
                place="--metric",
                found=name,
                allowed=[one.id for one in found],
            )
        return found[0].median
    have = sorted({one.metric for point in record.points for one in point.measurements})
    raise InputError("the run measured no such metric", place="--metric", found=wanted, allowed=have)


def _point(record: Judged, question: RunQuestion, has: Callable[[MeasuredPoint], bool]) -> MeasuredPoint:
    having = [point for point in record.points if has(point)]
    named = [point for point in having if question.point in (None, point.id)]
    if len(named) != 1:
        raise InputError(
            "expected one point with the number",
            place="--point",
            found=question.point or "none named",
            allowed=[point.id for point in having],
        )
    return named[0]
