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

from twinrun.execution.engine import (
    PYTHON,
    Command,
    Engine,
    NodeCommand,
    Renderer,
    Workspace,
    job_file,
    log_folder,
    point_folder,
    stop_file,
)
from twinrun.execution.failures import failure_of, with_last_words
from twinrun.execution.follower import Follower, bytes_of
from twinrun.execution.launchers import Launcher, RankPlacement, Rendezvous
from twinrun.execution.pending import Pending, SchedulerSilentError, forget_pending, remember
from twinrun.execution.schedulers import Scheduler, Submission
from twinrun.execution.staying import StayingRanks, processes
from twinrun.execution.task import Task
from twinrun.foundation.errors import MachineError, RunError, RunInterruptedError, TwinrunError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.machine.memory import kills_for_memory
from twinrun.protocol.allocation import Allocation, NodeReport, RankReport
from twinrun.protocol.job import FOLLOWING, FollowingPoint, Job, Stop
from twinrun.protocol.metrics_lines import forget as forget_lines

POLL_SECONDS = 0.1
METRICS = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is started for a point: its script, with one job for all ranks of a placement."""

    placement: RankPlacement
    script: Path | str
    """A file, or the name of a module."""
    job: Job
    """Its paths are as the ranks see them."""
    reaches_store: bool = False
    """Whether the ranks talk to an object store."""


class LaunchResult(Frozen):
    """A launch that ended well."""

    attempt: str
    """What the lines of its metrics carry."""
    allocation: Allocation
    processes: tuple[str, ...] = ()
    """The process of each rank, in their order."""


@dataclass(frozen=True, kw_only=True)
class RankCommands:
    """The commands that start launches: engine, launcher and scheduler put together."""

    renderer: Renderer
    launcher: Launcher
    scheduler: Scheduler
    workspace: Workspace
    cores: int
    """CPU cores of this machine."""
    variables: Mapping[str, str]
    """They go into the environment of every rank."""

    def task(self, launch: Launch, *, attempt: str, following: Path | None = None) -> Task:
        """Return what the scheduler starts for `launch`; pure.

        Args:
            following: folder in which further points of the same ranks are named; None where they have one.
        """
        placement = launch.placement
        starter = self.launcher.starter(placement, cores=self._rank_cores(placement))
        return Task(
            point=placement.id,
            nodes=placement.nodes,
            ranks_per_node=placement.devices_per_node,
            cores_per_rank=self._rank_cores(placement),
            commands=self.render(launch, attempt=attempt, following=following),
            starter=starter,
            identity=self.launcher.IDENTITY,
        )

    def _rank_cores(self, placement: RankPlacement) -> int:
        """Return the cores of each rank: those that the site gives it, or its share of this machine."""
        site = self.scheduler.site
        return site.site.rank_cores if site else max(1, self.cores // placement.devices_per_node)

    def render(
        self, launch: Launch, *, attempt: str, following: Path | None = None
    ) -> tuple[NodeCommand, ...]:
        """Return the command of each node of `launch`, or the one that all start; pure, see `task`.

        Raises:
            MachineError: the stack is where srun alone leads.
        """
        inside, point = self.renderer.inside, launch.placement.id
        job = job_file(self.workspace.run, point)
        script = launch.script
        program = (inside(script),) if isinstance(script, Path) else ("-m", script)
        command = Command(
            arguments=(PYTHON, *program, "--job", inside(job)),
            variables=dict(self.variables) | ({FOLLOWING: inside(following)} if following else {}),
            reaches_store=launch.reaches_store,
        )
        rendered = tuple(
            self.launcher.render(
                command,
                placement=launch.placement,
                node=node,
                rendezvous=Rendezvous(
                    first_node=self.scheduler.first_node(), port=self.scheduler.port(), id=attempt
                ),
                logs=inside(log_folder(self.workspace.run, point)),
                cores=self._rank_cores(launch.placement) * launch.placement.devices_per_node,
                in_stack=self.renderer.render,
            )
            for node in self.scheduler.node_names(launch.placement.nodes)
        )
        others = [word for word in self.launcher.starter(launch.placement, cores=1)[:1] if word != "srun"]
        if rendered[0].srun_options and (not self.scheduler.abilities.steps or others):
            raise MachineError(
                "srun alone starts commands of this engine",
                place=point,
                found=", ".join([f"--scheduler {self.scheduler.name}", *others]),
                hint="add --cluster SITE of Slurm, and the launcher srun or torchrun",
            )
        return rendered


class Ranks:
    """Starts launches in one engine, and keeps what their ranks write in one run folder."""

    def __init__(self, *, engine: Engine, commands: RankCommands) -> None:
        """Take an engine and what composes its commands."""
        self._engine = engine
        self._run = commands.workspace.run
        self._commands = commands
        self._staying: StayingRanks | None = None

    def inside(self, path: Path) -> str:
        """Return `path` as the ranks see it."""
        return self._engine.inside(path)

    def run(
        self, launch: Launch, *, place: int = 0, stay: bool = False, show: Callable[[bytes], None]
    ) -> LaunchResult | None:
        """Run `launch` in a fresh folder, showing each line of its metrics; None when memory ran out.

        Args:
            place: which of the attempts at the point it is, counted from 0.
            stay: whether its ranks wait for the next launch, and are ended by `close`; without effect where
                each point is a job of a site, or runs as another user.

        Raises:
            Interrupted: the ranks were told to end; says after which step they have saved.
            MachineError: the nodes cannot be had or differ in software, or the command cannot be started.
            RunError: a rank failed; names it and shows the end of its log.
        """
        offset = bytes_of(self._run / METRICS)
        submission, pending = self._submit(launch, place=place, detached=False, stay=stay)
        return self._finish(launch.placement, submission, pending, offset=offset, show=show)

    def close(self) -> None:
        """End ranks that wait for a further point."""
        if self._staying:
            self._staying.end()
        self._staying = None

    def begin(self, launch: Launch, *, place: int) -> Pending:
        """Submit `launch` in a fresh folder and leave it to its scheduler; raises as `run` does."""
        return self._submit(launch, place=place, detached=True)[1]

    def goes_on(self, pending: Pending) -> bool:
        """Say whether what was submitted has not ended; raises as `run` does."""
        try:
            return self._adopt(pending).poll() is None
        except (RunError, RunInterruptedError):
            # Whoever collects it says so.
            return False

    def collect(
        self, placement: RankPlacement, pending: Pending, *, show: Callable[[bytes], None]
    ) -> LaunchResult | None:
        """Go on with what was submitted, by this process or another, as `run` does."""
        return self._finish(placement, self._adopt(pending), pending, offset=0, show=show)

    def _adopt(self, pending: Pending) -> Submission:
        logs = log_folder(self._run, pending.point)
        return self._commands.scheduler.adopt(pending.handle, point=pending.point, logs=logs)

    def _submit(
        self, launch: Launch, *, place: int, detached: bool, stay: bool = False
    ) -> tuple[Submission, Pending]:
        point, attempt = launch.placement.id, uuid.uuid4().hex[:12]
        clear(self._run, point)
        write_atomically(
            job_file(self._run, point), job_text(launch.job.model_copy(update={"attempt": attempt}))
        )
        scheduler = self._commands.scheduler
        submission = self._taken(launch) or self._started(launch, attempt=attempt, stay=stay)
        pending = Pending(
            point=point,
            place=place,
            attempt=attempt,
            scheduler=scheduler.name,
            site=scheduler.site.name if scheduler.site else "",
            handle=submission.handle,
            detached=detached,
        )
        if pending.handle:
            remember(self._run, pending)
        return submission, pending

    def _taken(self, launch: Launch) -> Submission | None:
        """Give `launch` to ranks that wait for it; else end those that wait, and return None."""
        inside, point = self._commands.renderer.inside, launch.placement.id
        named = FollowingPoint(
            job=inside(job_file(self._run, point)), logs=inside(log_folder(self._run, point))
        )
        if self._staying and self._staying.take(_kind(launch), named):
            return self._staying
        self.close()
        return None

    def _started(self, launch: Launch, *, attempt: str, stay: bool) -> Submission:
        point, scheduler = launch.placement.id, self._commands.scheduler
        following = self._run / "following" / attempt
        task = self._commands.task(launch, attempt=attempt)
        # Ranks of a site end with its job, and a run folder is handed to another user for one point.
        stays = stay and scheduler.site is None and task.commands[0].writer is None
        if stays:
            following.mkdir(parents=True)
            task = self._commands.task(launch, attempt=attempt, following=following)
        submission = scheduler.submit(
            task,
            run=self._run,
            logs=log_folder(self._run, point),
            start=lambda command, log: self._engine.start(command, log=log),
        )
        if not stays:
            return submission
        self._staying = StayingRanks(
            started=submission, kind=_kind(launch), folder=following, world_size=launch.placement.world_size
        )
        return self._staying

    def _finish(
        self,
        placement: RankPlacement,
        submission: Submission,
        pending: Pending,
        *,
        offset: int,
        show: Callable[[bytes], None],
    ) -> LaunchResult | None:
        """Follow what was submitted to its end, and forget it unless it may go on."""
        try:
            result = self._followed(placement, submission, pending, offset=offset, show=show)
        except SchedulerSilentError:
            raise
        except TwinrunError:
            forget_pending(self._run, placement.id)
            raise
        except KeyboardInterrupt:
            if not pending.detached:
                forget_pending(self._run, placement.id)
            raise
        forget_pending(self._run, placement.id)
        return result

    def _followed(
        self,
        placement: RankPlacement,
        submission: Submission,
        pending: Pending,
        *,
        offset: int,
        show: Callable[[bytes], None],
    ) -> LaunchResult | None:
        point, attempt = placement.id, pending.attempt
        follower = Follower(self._run / METRICS, attempt=attempt, show=show, offset=offset)
        before = _kills(self._commands.scheduler)
        try:
            status = _follow(
                submission, follower, checked=lambda: _checked(self._run, placement), keep=pending.detached
            )
        except SchedulerSilentError:
            raise
        except RunError as error:
            raise with_last_words(error, run=self._run, point=point) from None
        if status:
            _raise_if_stopped(self._run, point)
            self._raise_unless_memory(placement, submission, status, since=before)
            return None
        return LaunchResult(
            attempt=attempt,
            allocation=self._allocation(placement, submission),
            processes=processes(rank_reports(point_folder(self._run, point))),
        )

    def _allocation(self, placement: RankPlacement, submission: Submission) -> Allocation:
        """Return the nodes as their ranks report them; raises MachineError where their software differs."""
        reports = rank_reports(point_folder(self._run, placement.id))
        nodes = tuple(dict.fromkeys(report.host for report in reports)) or submission.nodes
        # Again: a job that was requeued may have got other nodes.
        _demand_same_software(_described(reports), placement.id)
        scheduler = self._commands.scheduler
        return Allocation(
            scheduler=scheduler.name,
            nodes=nodes,
            site=scheduler.site.name if scheduler.site else None,
            reports=_described(reports),
            bindings=tuple(one.binding for one in reports) if any(one.binding for one in reports) else (),
        )

    def _raise_unless_memory(
        self, placement: RankPlacement, submission: Submission, status: int, *, since: int | None
    ) -> None:
        """Raise RunError for a failed launch, but for a rank whose device ran out of memory.

        Args:
            since: what `_kills` said before the launch.
        """
        culprit, logs = self._commands.launcher.culprit, submission.logs()
        now = _kills(self._commands.scheduler)
        kills = None if now is None or since is None else now - since
        error = failure_of(placement, run=self._run, logs=logs, culprit=culprit, status=status, kills=kills)
        if error:
            raise error


def _follow(submission: Submission, follower: Follower, *, checked: Callable[[], bool], keep: bool) -> int:
    """Show lines until `submission` ends, and return its exit status.

    Args:
        checked: asked until it says yes; may raise.
        keep: whether it goes on after an interruption; else nothing outlives one.
    """
    done = False
    try:
        while (status := submission.poll()) is None:
            done = done or checked()
            follower.follow()
            time.sleep(POLL_SECONDS)
        follower.follow()
    except KeyboardInterrupt:
        if not keep:
            submission.cancel()
        raise
    except BaseException:
        submission.cancel()
        raise
    submission.cancel()
    return status


def _checked(run: Path, placement: RankPlacement) -> bool:
    """Say whether all ranks have reported; raises MachineError where the software of nodes differs."""
    folder = point_folder(run, placement.id)
    if len(list((folder / "ranks").glob("*.json"))) < placement.world_size:
        return False
    _demand_same_software(_described(rank_reports(folder)), placement.id)
    return True


def _kills(scheduler: Scheduler) -> int | None:
    """Return how often the kernel of the ranks has killed for memory; None where it cannot be asked."""
    return None if scheduler.site else kills_for_memory()


def _raise_if_stopped(run: Path, point: str) -> None:
    file = stop_file(run, point)
    if file.exists():
        raise RunInterruptedError(
            f"the ranks were told to end and have saved after step {load_json(file, Stop).step}",
            place=point,
            hint="the same command with --resume goes on from there",
        )


def _kind(launch: Launch) -> tuple[object, ...]:
    """Return what launches have in common that the same ranks may run."""
    placement = launch.placement
    size = (placement.nodes, placement.devices_per_node)
    return (*size, launch.script, launch.reaches_store, launch.job.imports)


def job_text(job: Job) -> str:
    """Return what the job file holds."""
    return job.model_dump_json(indent=1) + "\n"


def rank_reports(folder: Path) -> list[RankReport]:
    """Return what the ranks of a point report, in their order."""
    reports = [load_json(path, RankReport) for path in (folder / "ranks").glob("*.json")]
    return sorted(reports, key=lambda one: one.rank)


def _described(reports: Sequence[RankReport]) -> dict[str, NodeReport]:
    return {report.host: report.node for report in reports if report.node}


def _demand_same_software(nodes: Mapping[str, NodeReport], point: str) -> None:
    """Raise MachineError where a node has other software than most: its numbers would be nobody's."""
    found = {host: _software(node) for host, node in nodes.items()}
    most, _ = Counter(found.values()).most_common(1)[0] if found else ("", 0)
    other = next((host for host, digest in found.items() if digest != most), None)
    if other:
        like = next(host for host, digest in found.items() if digest == most)
        raise MachineError(
            "the nodes have different software",
            place=point,
            found=f"{other} has {found[other]}, {like} has {most}",
            allowed="one environment or image on all nodes",
            hint=f"install it anew on {other}, or leave that node out with `exclude` of cluster.toml",
        )


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
