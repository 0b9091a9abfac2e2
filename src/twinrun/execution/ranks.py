"""Starting the ranks of one point, following what they write, and naming the one that failed."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from twinrun.execution.engine import (
    PYTHON,
    Command,
    Engine,
    Workspace,
    job_file,
    log_folder,
    point_folder,
    stop_file,
)
from twinrun.execution.failures import Pulses, failure_of, with_last_words
from twinrun.execution.launchers import Launcher, Rendezvous
from twinrun.execution.schedulers import Scheduler, Submission
from twinrun.execution.task import Pending, SchedulerSilentError, Task, forget_pending, remember
from twinrun.foundation.errors import MachineError, RunError, RunInterruptedError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import load_json
from twinrun.protocol.allocation import Allocation, NodeReport, Placement, RankReport
from twinrun.protocol.job import Job, MetricsLine, Stop
from twinrun.protocol.job import forget as forget_lines

POLL_SECONDS = 0.1
METRICS = "metrics.jsonl"
# Is given each line of the metrics.
Show = Callable[[bytes], None]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is started for a point: its script, with one job for all ranks of a placement."""

    placement: Placement
    script: Path | str
    """A file, or the name of a module."""
    job: Job
    """Its paths are as the ranks see them."""


@dataclass(frozen=True, kw_only=True)
class RankCommands:
    """The commands that start launches: engine, launcher and scheduler put together."""

    renderer: Engine
    launcher: Launcher
    scheduler: Scheduler
    workspace: Workspace
    cores: int
    """CPU cores of this machine."""
    variables: Mapping[str, str]
    """They go into the environment of every rank."""

    def task(self, launch: Launch, *, attempt: str) -> Task:
        """Return what the scheduler starts for `launch`; pure. Raises MachineError where srun alone leads."""
        placement, script, site = launch.placement, launch.script, self.scheduler.site
        inside, run, ranks = self.renderer.inside, self.workspace.run, placement.devices_per_node
        cores = site.site.rank_cores if site else max(1, self.cores // ranks)
        program = (inside(script),) if isinstance(script, Path) else ("-m", script)
        words = (PYTHON, *program, "--job", inside(job_file(run, placement.id)))
        meeting = Rendezvous(first_node=self.scheduler.first_node, port=self.scheduler.port, id=attempt)
        commands = [
            self.launcher.render(
                Command(arguments=words, variables=dict(self.variables)),
                placement=placement,
                node=node,
                rendezvous=meeting,
                logs=inside(log_folder(run, placement.id)),
                cores=cores,
            )
            for node in self.scheduler.node_names(placement.nodes)
        ]
        rendered = tuple(map(self.renderer.render, commands))
        starter = self.launcher.starter(placement, cores=cores)
        others = [word for word in starter[:1] if word != "srun"]
        if rendered[0].srun_options and (not self.scheduler.abilities.steps or others):
            hint = "add --cluster SITE of Slurm, and the launcher srun or torchrun"
            found, message = f"--scheduler {self.scheduler.name}", "srun alone starts commands of this engine"
            raise MachineError(message, place=placement.id, found=", ".join([found, *others]), hint=hint)
        return Task(
            point=placement.id,
            nodes=placement.nodes,
            ranks_per_node=ranks,
            cores_per_rank=cores,
            commands=rendered,
            starter=starter,
            identity=self.launcher.IDENTITY,
        )


class Ranks:
    """Starts launches in one engine, and keeps what their ranks write in one run folder."""

    def __init__(self, *, engine: Engine, commands: RankCommands) -> None:
        """Take an engine and what composes its commands."""
        self._engine, self._commands = engine, commands
        self._run, self._scheduler = commands.workspace.run, commands.scheduler

    def run(self, launch: Launch, *, place: int = 0, show: Show) -> Allocation | None:
        """Run `launch` in a fresh folder, showing each line of its metrics; None when memory ran out.

        Args:
            place: which of the attempts at the point it is, counted from 0.

        Returns:
            The nodes that it ran on.

        Raises:
            Interrupted: the ranks were told to end; says after which step they have saved.
            MachineError: the nodes cannot be had or differ in software, or the command cannot be started.
            RunError: a rank failed; names it and shows the end of its log.
        """
        metrics = self._run / METRICS
        offset = metrics.stat().st_size if metrics.exists() else 0
        submission, pending = self._submit(launch, place=place, detached=False)
        return self._follow(launch.placement, submission, pending, offset=offset, show=show)

    def begin(self, launch: Launch, *, place: int) -> Pending:
        """Submit `launch` in a fresh folder and leave it to its scheduler; raises as `run` does."""
        return self._submit(launch, place=place, detached=True)[1]

    def goes_on(self, pending: Pending) -> bool:
        """Say whether what was submitted has not ended; raises as `run` does."""
        try:
            return self.adopted(pending).poll() is None
        except (RunError, RunInterruptedError):
            # Whoever collects it says so.
            return False

    def collect(self, placement: Placement, pending: Pending, *, show: Show) -> Allocation | None:
        """Go on with what was submitted, by this process or another, as `run` does."""
        return self._follow(placement, self.adopted(pending), pending, offset=0, show=show)

    def adopted(self, pending: Pending) -> Submission:
        """Return what was submitted, by this process or another."""
        logs = log_folder(self._run, pending.point)
        return self._scheduler.adopt(pending.handle, point=pending.point, logs=logs)

    def _submit(self, launch: Launch, *, place: int, detached: bool) -> tuple[Submission, Pending]:
        point, attempt, site = launch.placement.id, uuid.uuid4().hex[:12], self._scheduler.site
        clear(self._run, point)
        job = launch.job.model_copy(update={"attempt": attempt})
        write_atomically(job_file(self._run, point), job.model_dump_json(indent=1) + "\n")
        submission = self._scheduler.submit(
            self._commands.task(launch, attempt=attempt),
            run=self._run,
            logs=log_folder(self._run, point),
            start=lambda command, log: self._engine.start(command, log=log),
        )
        pending = Pending(
            point=point,
            place=place,
            attempt=attempt,
            detached=detached,
            site=site.name if site else "",
            scheduler=self._scheduler.name,
            handle=submission.handle,
        )
        if pending.handle:
            remember(self._run, pending)
        return submission, pending

    def _follow(
        self, placement: Placement, submission: Submission, pending: Pending, *, offset: int, show: Show
    ) -> Allocation | None:
        """Follow what was submitted to its end; what may go on alone is remembered, all else is ended."""
        point, local = placement.id, self._scheduler.site is None
        folder, stopped = point_folder(self._run, point), stop_file(self._run, point)
        pulses = Pulses(folder, point=point, here=local)
        alike = False
        try:
            while True:
                status = submission.poll()
                if not alike and len(list((folder / "ranks").glob("*.json"))) >= placement.world_size:
                    _demand_same_software(rank_reports(folder), point)
                    alike = True
                offset = _shown(self._run / METRICS, offset, attempt=pending.attempt, show=show)
                if status is not None:
                    break
                pulses.demand_fresh()
                time.sleep(POLL_SECONDS)
        except SchedulerSilentError:
            raise
        except BaseException as error:
            if not (isinstance(error, KeyboardInterrupt) and pending.detached):
                submission.cancel()
                forget_pending(self._run, point)
            if isinstance(error, RunError):
                raise with_last_words(error, run=self._run, point=point) from None
            raise
        submission.cancel()
        forget_pending(self._run, point)
        if status == 0:
            return self._allocation(folder, submission, point)
        if stopped.exists():
            message = f"the ranks were told to end and have saved after step {load_json(stopped, Stop).step}"
            hint = "the same command with --resume goes on from there"
            raise RunInterruptedError(message, place=point, hint=hint)
        culprit, logs = self._commands.launcher.culprit, submission.logs()
        if failure := failure_of(placement, self._run, logs, culprit=culprit, status=status):
            raise failure
        return None

    def _allocation(self, folder: Path, submission: Submission, point: str) -> Allocation:
        """Return the nodes as their ranks report them; raises MachineError where their software differs."""
        reports, site = rank_reports(folder), self._scheduler.site
        bindings = tuple(one.binding for one in reports)
        return Allocation(
            scheduler=self._scheduler.name,
            site=site.name if site else None,
            nodes=tuple(dict.fromkeys(report.host for report in reports)) or submission.nodes,
            # Again: a job that was requeued may have got other nodes.
            reports=_demand_same_software(reports, point),
            bindings=bindings if any(bindings) else (),
        )


def _shown(metrics: Path, offset: int, *, attempt: str, show: Show) -> int:
    """Show the whole lines of one attempt from `offset` on, and return where they end."""
    if not metrics.exists():
        return offset
    # Ranks that a scheduler starts again drop what they wrote before.
    offset = min(offset, metrics.stat().st_size)
    with metrics.open("rb") as stream:
        stream.seek(offset)
        new = stream.read()
    whole = new[: new.rfind(b"\n") + 1]
    for line in whole.splitlines():
        # A process that outlived its attempt may still write.
        try:
            if MetricsLine.model_validate_json(line).attempt == attempt:
                show(line)
        except ValidationError:
            continue
    return offset + len(whole)


def rank_reports(folder: Path) -> list[RankReport]:
    """Return what the ranks of a point report, in their order."""
    reports = [load_json(path, RankReport) for path in (folder / "ranks").glob("*.json")]
    return sorted(reports, key=lambda one: one.rank)


def _demand_same_software(reports: Sequence[RankReport], point: str) -> dict[str, NodeReport]:
    """Return the reports of nodes; raises MachineError where one has other software than most.

    Its numbers would be nobody's.
    """
    nodes = {report.host: report.node for report in reports if report.node}
    found = {host: _software(node) for host, node in nodes.items()}
    most, _ = Counter(found.values()).most_common(1)[0] if found else ("", 0)
    if other := next((host for host, digest in found.items() if digest != most), None):
        like = next(host for host, digest in found.items() if digest == most)
        message, allowed = "the nodes have different software", "one environment or image on all nodes"
        hint = f"install it anew on {other}, or leave that node out with `exclude` of cluster.toml"
        both = f"{other} has {found[other]}, {like} has {most}"
        raise MachineError(message, place=point, found=both, allowed=allowed, hint=hint)
    return nodes


def _software(node: NodeReport) -> str:
    packages = f"packages {node.software_sha256[:12]}"
    return f"image {node.image[:19]}, {packages}" if node.image else packages


def clear(run: Path, point: str) -> None:
    """Take away what an earlier attempt at `point` has left: files, logs, lines of metrics."""
    folders = point_folder(run, point), log_folder(run, point)
    # A point without a folder has not been started, and has no lines: reading those of all others before
    # each start would take longer than many points.
    if any(os.path.lexists(stale) for stale in folders):
        for stale in folders:
            shutil.rmtree(stale, ignore_errors=True)
        forget_lines(run / METRICS, point)
    log_folder(run, point).mkdir(parents=True)
