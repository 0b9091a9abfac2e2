"""Running one point: start its ranks, follow their metrics, try a smaller microbatch when memory is short."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel, ValidationError

from twinrun.benchmark import BenchJob, BenchResult, MeasuredLine
from twinrun.engine import Command, Engine, Site
from twinrun.errors import MachineError, RunError
from twinrun.files import write_atomically
from twinrun.job import BenchPlan, Plan
from twinrun.manifest import load_json
from twinrun.process import last_lines
from twinrun.progress import Display
from twinrun.record import Attempt
from twinrun.sizing import Case, Place, Point
from twinrun.training import OUT_OF_MEMORY, Job, PointResult, StepMetrics

POLL_SECONDS = 0.1
METRICS = "metrics.jsonl"


class Ranks:
    """Starts the ranks of points of one plan in one engine, and keeps what they write in one run folder."""

    def __init__(
        self,
        *,
        plan: Plan | BenchPlan,
        engine: Engine,
        launcher: ModuleType,
        site: Site,
        cores: int,
        variables: Mapping[str, str],
    ) -> None:
        """Take what all points share; `variables` go into the environment of every rank."""
        self.plan = plan
        self.inside = engine.inside
        self._engine = engine
        self._launcher = launcher
        self._site = site
        self._cores = cores
        self._extra = dict(variables)

    @property
    def metrics(self) -> Path:
        """The file that the first rank appends lines to."""
        return self._site.run / METRICS

    def fresh_folder(self, point: Place) -> Path:
        """Return the folder of `point`, without what an earlier try has left there and in the logs."""
        folder, logs = point_folder(self._site.run, point), self._logs(point)
        for stale in (folder, logs):
            shutil.rmtree(stale, ignore_errors=True)
        forget(self.metrics, point.id)
        logs.mkdir(parents=True)
        return folder

    def run(self, point: Place, job: Job | BenchJob, folder: Path, *, show: Callable[[bytes], None]) -> bool:
        """Run the ranks of `point` on `job`, showing each line of their metrics; False when memory ran out.

        Raises:
            RunError: a rank failed; names it and shows the end of its log.
        """
        file, logs = folder / "job.json", self._logs(point)
        write_atomically(file, job.model_dump_json(indent=1) + "\n")
        status = self._follow(self._command(point, file, logs), logs / "launcher.log", show)
        if status:
            self._raise_unless_memory(point, logs, status)
        return status == 0

    def _logs(self, point: Place) -> Path:
        return self._site.run / "log" / point.id

    def _command(self, point: Place, job: Path, logs: Path) -> Command:
        command: Command = self._launcher.render(
            self.plan,
            point,
            script=self.inside(self._site.root / self.plan.script),
            job=self.inside(job),
            logs=self.inside(logs),
            cores=self._cores,
        )
        return command.model_copy(update={"variables": command.variables | self._extra})

    def _follow(self, command: Command, log: Path, show: Callable[[bytes], None]) -> int:
        """Start `command`, show its lines, and return its exit status; nothing outlives an interruption."""
        offset = self.metrics.stat().st_size if self.metrics.exists() else 0
        running = self._engine.start(command, log=log)
        try:
            while (status := running.poll()) is None:
                offset = self._show(offset, show)
                time.sleep(POLL_SECONDS)
            self._show(offset, show)
            return status
        finally:
            running.stop()

    def _show(self, offset: int, show: Callable[[bytes], None]) -> int:
        if not self.metrics.exists():
            return offset
        with self.metrics.open("rb") as stream:
            stream.seek(offset)
            new = stream.read()
        whole = new[: new.rfind(b"\n") + 1]
        for line in whole.splitlines():
            show(line)
        return offset + len(whole)

    def _raise_unless_memory(self, point: Place, logs: Path, status: int) -> None:
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


class Runner:
    """Trains points of a sweep."""

    def __init__(self, *, plan: Plan, ranks: Ranks, data: Path, display: Display) -> None:
        self._plan = plan
        self._ranks = ranks
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
        folder = self._ranks.fresh_folder(point)
        steps = self._plan.training.steps
        self._display.begin(
            point.id, steps=steps, status=f"starting {point.world_size} rank(s), microbatch {microbatch}"
        )

        def show(line: bytes) -> None:
            self._display.step(StepMetrics.model_validate_json(line), steps=steps)

        ended = self._ranks.run(point, self._job(point, microbatch, folder), folder, show=show)
        return load_json(folder / "result.json", PointResult) if ended else None

    def _job(self, point: Point, microbatch: int, folder: Path) -> Job:
        inside = self._ranks.inside
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
            metrics=inside(self._ranks.metrics),
        )


class BenchRunner:
    """Measures cases of a benchmark."""

    def __init__(self, *, plan: BenchPlan, ranks: Ranks, accelerator: bool, display: Display) -> None:
        self._plan = plan
        self._ranks = ranks
        self._accelerator = accelerator
        self._display = display

    def run(self, case: Case) -> BenchResult:
        """Measure `case`.

        Raises:
            MachineError: the device's memory is too small for it.
            RunError: the script failed; shows the end of its log.
        """
        folder, inside = self._ranks.fresh_folder(case), self._ranks.inside
        self._display.begin(case.id, steps=1, status="starting")
        job = BenchJob(
            recipe=self._plan.recipe,
            point=case.id,
            settings=case.settings,
            bench=self._plan.bench,
            accelerator=self._accelerator,
            out=inside(folder),
            metrics=inside(self._ranks.metrics),
        )

        def show(line: bytes) -> None:
            self._display.measured(MeasuredLine.model_validate_json(line))

        if not self._ranks.run(case, job, folder, show=show):
            raise MachineError(
                "the case does not fit into the memory of this device",
                place=case.id,
                hint="name other cases with --set cases=",
            )
        return load_json(folder / "result.json", BenchResult)


def point_folder(run: Path, point: Place) -> Path:
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
            other = _Line.model_validate_json(line).point != point
        except ValidationError:
            other = False
        if other:
            kept.append(json.dumps(json.loads(line)))
    write_atomically(metrics, "".join(f"{line}\n" for line in kept))


class _Line(BaseModel):
    """What every line of metrics has."""

    point: str
