"""Slurm: one batch job a point, whose script is written from the plan alone, polled until it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from twinrun.execution import shell
from twinrun.execution.abilities import Abilities
from twinrun.execution.batch import (
    LOG,
    SCRIPT,
    Dialect,
    batch_script,
    demand_shared,
    job_name,
    refuse_failed_set_up,
    refuse_own_options,
    written_status,
)
from twinrun.execution.pending import SchedulerSilentError
from twinrun.execution.schedulers import Start
from twinrun.execution.slurm_client import JobState, SlurmClient, demand_devices, device_options
from twinrun.execution.task import Task
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError, TwinrunError
from twinrun.foundation.files import write_atomically
from twinrun.manifests.cluster import LoadedSite, Site

# A controller that restarts is silent for a moment; one that stays away is gone.
PATIENCE_SECONDS = 60.0
# Beyond the time in which Slurm kills what it has told to end.
CANCEL_SECONDS = 90.0
# Jobs that somebody or something else has ended, and that may go on.
_STOPPED = ("CANCELLED", "PREEMPTED", "TIMEOUT", "DEADLINE", "REVOKED")
# Options of sbatch that other keys of a site stand for.
_OWN = (
    *(
        "job-name",
        "J",
        "nodes",
        "N",
        "ntasks",
        "n",
        "ntasks-per-node",
        "cpus-per-task",
        "c",
        "mem",
        "time",
        "t",
    ),
    *("partition", "p", "account", "A", "qos", "q", "constraint", "C", "gres", "gpus-per-node", "exclusive"),
    *("exclude", "x", "signal", "requeue", "no-requeue", "output", "o", "chdir", "D"),
)


def open_scheduler(*, site: LoadedSite | None) -> Slurm:
    """Return the Slurm of a site; raises InputError without one."""
    if site is None:
        hint = "add --cluster SITE; `invoke cluster up` makes the site `local`"
        raise InputError("Slurm is at a site", place="--scheduler slurm", found="no --cluster", hint=hint)
    demand_devices(site)
    refuse_own_options(site, _OWN)
    return Slurm(site)


class Slurm:
    """The scheduler of one site."""

    name = "slurm"
    abilities = Abilities(steps=True, hosts=True)

    def __init__(self, site: LoadedSite) -> None:
        self.site = site
        self._client = SlurmClient(site)

    def size(self) -> int:
        """Return the nodes of the partition that are up; raises MachineError where Slurm does not answer."""
        try:
            return self._client.size()
        except RunError as error:
            found = str(error.found).strip()
            raise MachineError("Slurm does not answer", place=self.site.place, found=found) from None

    def unusable(self, *, nodes: int) -> str | None:
        """Return why so many nodes cannot be had, or None."""
        try:
            found = self._client.size()
        except RunError as error:
            return f"Slurm does not answer: {str(error.found).strip()}"
        if nodes > found:
            return f"the plan has points of up to {nodes} nodes, and {found} of the site are up"
        return None

    def first_node(self) -> str:
        """Return the variable of the script that has the first node."""
        return f"${shell.FIRST_NODE}"

    def port(self) -> str:
        """Return the variable of the script that has a port of the job's own."""
        return f"${shell.PORT}"

    def node_names(self, nodes: int) -> tuple[str, ...]:
        """Return one variable: all nodes start the same command."""
        return (f"${shell.NODE}",)

    def script(self, task: Task, *, run: str, logs: str) -> str:
        """Return the sbatch script of `task`; pure."""
        dialect = _dialect(task, self.site.site, logs)
        return batch_script(task, site=self.site, run=run, logs=logs, dialect=dialect)

    def submit(self, task: Task, *, run: Path, logs: Path, start: Start) -> SlurmJob:
        """Write the script of `task` to its logs and hand it to sbatch.

        Raises:
            InputError: sbatch refuses what cluster.toml says, or nodes do not see the run folder.
            MachineError: Slurm does not know this machine.
        """
        demand_shared(self.site, run)
        file = logs / SCRIPT
        write_atomically(file, self.script(task, run=str(run), logs=str(logs)))
        output = f"--output={str(logs).replace('%', '%%')}/{LOG}"
        try:
            printed = self._client.ask("sbatch", "--parsable", output, f"--chdir={run}", str(file))
        except RunError as error:
            raise InputError(
                "sbatch refuses the job",
                place=self.site.place,
                found=str(error.found).strip(),
                hint=f"the options are the first lines of {file}",
            ) from None
        return SlurmJob(printed.strip().partition(";")[0], client=self._client, logs=logs, point=task.point)

    def adopt(self, handle: str, *, point: str, logs: Path) -> SlurmJob:
        """Return the job with the number `handle`."""
        return SlurmJob(handle, client=self._client, logs=logs, point=point)


class SlurmJob:
    """A submitted job."""

    def __init__(self, number: str, *, client: SlurmClient, logs: Path, point: str) -> None:
        self._number = number
        self._client = client
        self._logs = logs
        self._point = point
        self._last: JobState | None = None
        self._asked = self._answered = time.monotonic()
        self._nodes: tuple[str, ...] = ()

    @property
    def handle(self) -> str:
        """Return the number of the job."""
        return self._number

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the host names of the nodes; empty while the job waits."""
        return self._nodes

    def poll(self) -> int | None:
        """Return the exit status, None until the job has ended; asks no oftener than the site wants.

        Raises:
            Interrupted: the job was cancelled, preempted, or out of time.
            RunError: a node died, or Slurm has not answered for a minute.
        """
        now = time.monotonic()
        if self._last and now - self._asked < self._client.site.site.poll_seconds:
            return None
        self._asked = now
        try:
            state = self._last = self._client.job(self._number)
        except (RunError, MachineError) as error:
            if "Invalid job id" in str(error.found):
                return self._forgotten()
            if now - self._answered > PATIENCE_SECONDS:
                raise self._silent(error) from None
            return None
        self._answered = now
        if state.nodes and not self._nodes:
            with contextlib.suppress(RunError):
                self._nodes = self._client.hosts(state.nodes)
        return self._status(state) if state.ended else None

    def _forgotten(self) -> int:
        """Return the status of a job that Slurm does not know any more, as its script has left it."""
        status = written_status(self._logs)
        if status is None:
            raise RunInterruptedError(
                f"job {self._number} has vanished",
                place=self._point,
                found="Slurm does not know it, and its script left no exit status",
                hint="the same command with --resume starts the point again",
            )
        refuse_failed_set_up(status, site=self._client.site, logs=self._logs)
        return status

    def logs(self) -> tuple[Path, ...]:
        """Return the files of the script and of each node, as far as they are there."""
        agents = sorted(self._logs.glob("launcher-*.log"), key=lambda path: (len(path.name), path.name))
        return tuple(path for path in (self._logs / LOG, *agents) if path.exists())

    def cancel(self) -> None:
        """End the job and wait until its nodes are given back; one that has ended is no error."""
        if self._last and self._last.ended:
            return
        # A Slurm that is gone can be asked for nothing; its nodes end the job at its time limit.
        with contextlib.suppress(RunError, MachineError):
            self._client.ask("scancel", "--quiet", self._number)
            deadline = time.monotonic() + CANCEL_SECONDS
            while not (state := self._client.job(self._number)).ended and time.monotonic() < deadline:
                time.sleep(min(0.5, self._client.site.site.poll_seconds))
            self._last = state

    def _status(self, state: JobState) -> int:
        late = state.limit_seconds - self._client.site.site.signal_seconds - 1
        if state.state in _STOPPED or (state.status and state.run_seconds >= late):
            raise RunInterruptedError(
                f"job {state.id} was ended: {state.state}",
                place=self._point,
                found=f"{state.reason}, after {state.run_seconds:.0f} s on {state.nodes or 'no node'}",
                hint="the same command with --resume runs the points that are left",
            )
        if state.state in ("NODE_FAIL", "BOOT_FAIL"):
            raise RunError(
                f"job {state.id} lost a node: {state.state}",
                place=self._point,
                found=f"of {state.nodes}: {self._client_down()}",
                hint="after mending it, or with it in `exclude` of cluster.toml, --resume goes on",
            )
        refuse_failed_set_up(state.status, site=self._client.site, logs=self._logs)
        return state.status or int(state.state != "COMPLETED")

    def _client_down(self) -> str:
        try:
            listed = self._client.ask("sinfo", "--noheader", "--Node", "--states=down", "--format=%N %E")
        except RunError as error:
            return error.message
        return ", ".join(dict.fromkeys(listed.splitlines())) or "no node is down any more"

    def _silent(self, error: TwinrunError) -> SchedulerSilentError:
        return SchedulerSilentError(
            f"Slurm has not answered for {PATIENCE_SECONDS:.0f} s",
            place=self._point,
            found=str(error.found or error.message).strip(),
            hint=f"job {self._number} may still run: when Slurm is back, --resume goes on with it",
        )


def _dialect(task: Task, site: Site, logs: str) -> Dialect:
    cores = task.ranks_per_node * task.cores_per_rank
    return Dialect(
        prefix="#SBATCH",
        options=tuple(_options(task, site)),
        hosts='scontrol show hostnames "$SLURM_JOB_NODELIST"',
        node="$SLURM_NODEID",
        number="SLURM_JOB_ID",
        each_node=(
            *("srun", f"--nodes={task.nodes}", f"--ntasks={task.nodes}", "--ntasks-per-node=1"),
            # Since Slurm 22.05 srun does not take it from sbatch.
            *(f"--cpus-per-task={cores}", "--cpu-bind=none", "--kill-on-bad-exit=1", "--input=none"),
            f"--output={_pattern(logs)}/launcher-%n.log",
        ),
        # Slurm itself requeues what it preempts; asked as well, it would start the job once more than needed.
        again='[[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) != RUNNING ]]'
        ' || scontrol requeue "$SLURM_JOB_ID"',
    )


def _options(task: Task, site: Site) -> Iterator[str]:
    """Yield the options of sbatch; cluster.toml holds words alone, so none needs quotes."""
    yield f"--job-name={job_name(task)}"
    yield f"--nodes={task.nodes}"
    yield f"--ntasks-per-node={task.ranks_per_node}"
    yield f"--cpus-per-task={task.cores_per_rank}"
    if site.memory_gib is not None:
        yield f"--mem={site.memory_gib}{'G' if site.memory_gib else ''}"
    yield f"--time={site.minutes}"
    for name in ("partition", "account", "qos", "constraint"):
        if value := getattr(site, name):
            yield f"--{name}={value}"
    yield from device_options(site, task.ranks_per_node)
    if site.exclusive:
        yield "--exclusive"
    if site.exclude:
        yield f"--exclude={','.join(site.exclude)}"
    if site.signal_seconds:
        yield f"--signal=TERM@{site.signal_seconds}"
    yield "--requeue" if site.requeue else "--no-requeue"
    yield from site.options


def _pattern(path: str) -> str:
    """Return a path in which Slurm replaces nothing."""
    return path.replace("%", "%%")
