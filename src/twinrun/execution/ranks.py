"""Starting the ranks of one point, following what they write, and naming the one that failed."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from twinrun.execution.batch import SchedulerSilentError
from twinrun.execution.engine import PYTHON, Command, Engine, Workspace, log_folder, point_folder, stop_file
from twinrun.execution.failures import Pulses, failure_of, with_last_words
from twinrun.execution.job_script import Task
from twinrun.execution.launchers import Launcher, Rendezvous
from twinrun.execution.schedulers import Scheduler, Submission
from twinrun.foundation.errors import MachineError, RunError, RunInterruptedError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.protocol.allocation import Allocation, NodeReport, Placement, RankReport
from twinrun.protocol.job import Job, MetricsLine, Stop
from twinrun.protocol.job import forget as forget_lines

POLL_SECONDS = 0.1
METRICS = "metrics.jsonl"
# Holds a file for each point that waits to be collected, so that another process goes on with it.
FOLDER = "jobs"
# Is given each line of the metrics.
Show = Callable[[bytes], None]


class Pending(Frozen):
    """A launch that a scheduler has taken and that is not collected yet."""

    point: str
    place: int
    """Which of the attempts of the plan it is, counted from 0."""
    attempt: str
    """What the lines of its metrics carry."""
    site: str
    handle: str
    """How the scheduler calls it."""
    detached: bool
    """Whether it goes on when the process that follows it is interrupted."""


def pending_of(run: Path, point: str) -> Pending | None:
    """Return what was submitted for a point and not collected, None where there is nothing."""
    file = _pending_file(run, point)
    return load_json(file, Pending) if file.is_file() else None


def all_pending(run: Path) -> tuple[Pending, ...]:
    """Return all that a run has submitted and not collected."""
    return tuple(load_json(file, Pending) for file in sorted((run / FOLDER).glob("*.json")))


def _pending_file(run: Path, point: str) -> Path:
    return run / FOLDER / f"{point}.json"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is started for a point: its script, with one job for all ranks of a placement."""

    placement: Placement
    script: Path | str
    """A file, or the name of a module."""
    job: Job
    """Its paths are as the ranks see them."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Starts launches: engine, launcher and scheduler put together, and the folders of a run."""

    engine: Engine
    """Writes commands, and starts them once it is open."""
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
        inside, run, ranks = self.engine.inside, self.workspace.run, placement.devices_per_node
        cores = site.site.rank_cores if site else max(1, self.cores // ranks)
        program = (inside(script),) if isinstance(script, Path) else ("-m", script)
        words = (PYTHON, *program, "--job", inside(_job_file(run, placement.id)))
        place, logs = (self.scheduler.first_node, self.scheduler.port), inside(log_folder(run, placement.id))
        command, meeting = (
            Command(arguments=words, variables=dict(self.variables)),
            Rendezvous(*place, attempt, logs),
        )
        rendered = tuple(
            self.engine.render(
                self.launcher.render(command, meeting, placement=placement, node=node, cores=cores)
            )
            for node in self.scheduler.node_names(placement.nodes)
        )
        starter = self.launcher.starter(placement, cores=cores)
        srun = "steps" in self.scheduler.abilities and starter[:1] in ((), ("srun",))
        if rendered[0].srun_options and not srun:
            hint = "add --cluster SITE of Slurm, and the launcher srun or torchrun"
            found = " ".join((f"--scheduler {self.scheduler.name}", *starter[:1]))
            message = "srun alone starts commands of this engine"
            raise MachineError(message, place=placement.id, found=found, hint=hint)
        return Task(
            point=placement.id,
            nodes=placement.nodes,
            ranks_per_node=ranks,
            cores_per_rank=cores,
            commands=rendered,
            starter=starter,
            identity=self.launcher.IDENTITY,
        )

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
        metrics = self.workspace.run / METRICS
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
        logs = log_folder(self.workspace.run, pending.point)
        return self.scheduler.adopt(pending.handle, point=pending.point, logs=logs)

    def _submit(self, launch: Launch, *, place: int, detached: bool) -> tuple[Submission, Pending]:
        point, attempt, site = launch.placement.id, uuid.uuid4().hex[:12], self.scheduler.site
        clear(self.workspace.run, point)
        job = launch.job.model_copy(update={"attempt": attempt})
        write_atomically(_job_file(self.workspace.run, point), job.model_dump_json(indent=1) + "\n")
        task, logs = self.task(launch, attempt=attempt), log_folder(self.workspace.run, point)
        submission = self.scheduler.submit(task, run=self.workspace.run, logs=logs, start=self.engine.start)
        pending = Pending(
            point=point,
            place=place,
            attempt=attempt,
            detached=detached,
            site=site.name if site else "",
            handle=submission.handle,
        )
        if pending.handle:
            write_atomically(_pending_file(self.workspace.run, point), pending.model_dump_json() + "\n")
        return submission, pending

    def _follow(
        self, placement: Placement, submission: Submission, pending: Pending, *, offset: int, show: Show
    ) -> Allocation | None:
        """Follow what was submitted to its end; what may go on alone is remembered, all else is ended."""
        point = placement.id
        folder, stopped = point_folder(self.workspace.run, point), stop_file(self.workspace.run, point)
        pulses, alike = Pulses(folder, point=point), False
        try:
            while (status := submission.poll()) is None:
                if not alike and len(list((folder / "ranks").glob("*.json"))) >= placement.world_size:
                    _demand_same_software(rank_reports(folder), point)
                    alike = True
                offset = _shown(self.workspace.run / METRICS, offset, attempt=pending.attempt, show=show)
                pulses.demand_fresh()
                time.sleep(POLL_SECONDS)
            _shown(self.workspace.run / METRICS, offset, attempt=pending.attempt, show=show)
        except SchedulerSilentError:
            raise
        except BaseException as error:
            if not (isinstance(error, KeyboardInterrupt) and pending.detached):
                self.end(submission, point)
            if isinstance(error, RunError):
                raise with_last_words(error, run=self.workspace.run, placement=placement) from None
            raise
        self.end(submission, point)
        if status == 0:
            return self._allocation(folder, submission, point)
        if stopped.exists():
            message = f"the ranks were told to end and have saved after step {load_json(stopped, Stop).step}"
            hint = "the same command with --resume goes on from there"
            raise RunInterruptedError(message, place=point, hint=hint)
        run, logs = self.workspace.run, submission.logs()
        if failure := failure_of(placement, run, logs, launcher=self.launcher, status=status):
            raise failure
        return None

    def end(self, submission: Submission, point: str) -> None:
        """End what was submitted, if it has not ended, and forget it."""
        submission.cancel()
        _pending_file(self.workspace.run, point).unlink(missing_ok=True)

    def _allocation(self, folder: Path, submission: Submission, point: str) -> Allocation:
        """Return the nodes as their ranks report them; raises MachineError where their software differs."""
        reports, site = rank_reports(folder), self.scheduler.site
        bindings = tuple(one.binding for one in reports)
        return Allocation(
            scheduler=self.scheduler.name,
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
    hosts = dict[str, list[str]]()
    for host, node in nodes.items():
        image = f"image {node.image[:19]}, " if node.image else ""
        hosts.setdefault(f"{image}packages {node.software_sha256[:12]}", []).append(host)
    if len(hosts) > 1:
        (most, (like, *_)), *_, (other, (host, *_)) = sorted(hosts.items(), key=lambda one: -len(one[1]))
        message, allowed = "the nodes have different software", "one environment or image on all nodes"
        hint = f"install it anew on {host}, or leave that node out with `exclude` of cluster.toml"
        both = f"{host} has {other}, {like} has {most}"
        raise MachineError(message, place=point, found=both, allowed=allowed, hint=hint)
    return nodes


def _job_file(run: Path, point: str) -> Path:
    """Return the file that tells the ranks of `point` what to do."""
    return point_folder(run, point) / "job.json"


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
