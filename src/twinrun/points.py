"""Running one point: start its ranks, follow their metrics, try a smaller microbatch when memory is short."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from pydantic import ValidationError

from twinrun.engine import Command, Engine, Site
from twinrun.errors import MachineError, RunError
from twinrun.files import write_atomically
from twinrun.job import Plan
from twinrun.manifest import load_json
from twinrun.process import last_lines
from twinrun.progress import Display
from twinrun.record import Attempt
from twinrun.sizing import Point
from twinrun.training import OUT_OF_MEMORY, Job, PointResult, StepMetrics

POLL_SECONDS = 0.1


class Runner:
    """Runs points of one plan in one engine, into one run folder."""

    def __init__(
        self,
        *,
        plan: Plan,
        engine: Engine,
        launcher: ModuleType,
        site: Site,
        data: Path,
        cores: int,
        display: Display,
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._launcher = launcher
        self._site = site
        self._cores = cores
        self._data = data
        self._display = display

    def run(self, point: Point) -> tuple[PointResult, tuple[Attempt, ...]]:
        """Train `point` at the largest microbatch that fits.

        Raises:
            MachineError: not even the smallest fits.
            RunError: a rank failed; names it and shows the end of its log.
        """
        attempts: list[Attempt] = []
        for microbatch in point.microbatches:
            result = self._try(point, microbatch)
            attempts.append(Attempt(microbatch=microbatch, outcome="fits" if result else "out of memory"))
            if result:
                return result, tuple(attempts)
            self._display.end(point.id, status=f"microbatch {microbatch}: out of memory")
        raise MachineError(
            "no microbatch fits into the memory of a device",
            place=point.id,
            found=f"tried {', '.join(str(size) for size in point.microbatches)}",
            hint="choose a smaller model, --set activation_checkpointing=true, or --set microbatch=1",
        )

    def _try(self, point: Point, microbatch: int) -> PointResult | None:
        """Return the result, or None when a device ran out of memory."""
        folder = point_folder(self._site.run, point)
        logs = self._site.run / "log" / point.id
        for stale in (folder, logs):
            shutil.rmtree(stale, ignore_errors=True)
        forget(self._site.run / "metrics.jsonl", point.id)
        job = folder / "job.json"
        write_atomically(job, self._job(point, microbatch, folder).model_dump_json(indent=1) + "\n")
        logs.mkdir(parents=True)
        steps = self._plan.training.steps
        self._display.begin(
            point.id, steps=steps, status=f"starting {point.world_size} rank(s), microbatch {microbatch}"
        )
        status = self._follow(self._command(point, job, logs), logs / "launcher.log")
        if status == 0:
            return load_json(folder / "result.json", PointResult)
        self._raise_unless_memory(point, logs, status)
        return None

    def _job(self, point: Point, microbatch: int, folder: Path) -> Job:
        inside = self._engine.inside
        return Job(
            recipe=self._plan.recipe,
            point=point.id,
            shape=self._plan.shape,
            training=self._plan.training,
            microbatch=microbatch,
            world_size=point.world_size,
            sharding=point.sharding or self._plan.training.sharding,
            accelerator=self._plan.gpu is not None,
            data=inside(self._data),
            out=inside(folder),
            metrics=inside(self._site.run / "metrics.jsonl"),
        )

    def _command(self, point: Point, job: Path, logs: Path) -> Command:
        inside = self._engine.inside
        command: Command = self._launcher.render(
            self._plan,
            point,
            script=inside(self._site.root / self._plan.script),
            job=inside(job),
            logs=inside(logs),
            cores=self._cores,
        )
        return command

    def _follow(self, command: Command, log: Path) -> int:
        """Start `command`, show its steps, and return its exit status; nothing outlives an interruption."""
        metrics = self._site.run / "metrics.jsonl"
        steps = self._plan.training.steps
        offset = metrics.stat().st_size if metrics.exists() else 0
        running = self._engine.start(command, log=log)
        try:
            while (status := running.poll()) is None:
                offset = self._show(metrics, offset, steps)
                time.sleep(POLL_SECONDS)
            self._show(metrics, offset, steps)
            return status
        finally:
            running.stop()

    def _show(self, metrics: Path, offset: int, steps: int) -> int:
        if not metrics.exists():
            return offset
        with metrics.open("rb") as stream:
            stream.seek(offset)
            new = stream.read()
        whole = new[: new.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._display.step(StepMetrics.model_validate_json(line), steps=steps)
        return offset + len(whole)

    def _raise_unless_memory(self, point: Point, logs: Path, status: int) -> None:
        """Raise RunError for a failed point, but for a rank whose device ran out of memory."""
        text = (logs / "launcher.log").read_text(encoding="utf-8", errors="replace")
        culprit = self._launcher.culprit(text)
        if culprit is None:
            raise RunError(
                f"the ranks could not be started or ended with status {status}",
                place=point.id,
                found=last_lines(text),
                hint=f"the whole log is {logs / 'launcher.log'}",
            )
        rank, rank_status = culprit
        if rank_status == OUT_OF_MEMORY:
            return
        log = next(rank_logs(logs, rank), logs / "launcher.log")
        raise RunError(
            f"rank {rank} of {point.world_size} failed with {describe_status(rank_status)}",
            place=point.id,
            found=last_lines(log.read_text(encoding="utf-8", errors="replace")),
            hint=f"the whole log is {log}; after mending the cause, --resume goes on",
        )


def point_folder(run: Path, point: Point) -> Path:
    """Return the folder that the ranks of `point` write to."""
    return run / "points" / point.id


def rank_logs(logs: Path, rank: int) -> Iterator[Path]:
    """Yield the logs of `rank` below `logs`, wherever the launcher's version puts them."""
    for name in ("stderr.log", "stdout.log"):
        yield from (
            path for path in logs.rglob(name) if path.parent.name == str(rank) and path.stat().st_size
        )


def describe_status(status: int) -> str:
    """Return an exit status in words; a negative one is a signal."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def forget(metrics: Path, point: str) -> None:
    """Drop the lines of `point` and any torn line, so that a point which starts over counts once."""
    if not metrics.exists():
        return
    kept = []
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            other = StepMetrics.model_validate_json(line).point != point
        except ValidationError:
            other = False
        if other:
            kept.append(json.dumps(json.loads(line)))
    write_atomically(metrics, "".join(f"{line}\n" for line in kept))
