"""Slurm: one batch job a point, polled until it ends."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from twinrun.execution import shell
from twinrun.execution.batch_script import batch_script
from twinrun.execution.schedulers import Start, Task
from twinrun.execution.slurm_client import JobState, SlurmClient
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError, TwinrunError
from twinrun.foundation.files import write_atomically
from twinrun.manifests.cluster import LoadedSite

SCRIPT = "job.sh"
# A controller that restarts is silent for a moment; one that stays away is gone.
PATIENCE_SECONDS = 60.0
# Beyond the time in which Slurm kills what it has told to end.
CANCEL_SECONDS = 90.0
# Jobs that somebody or something else has ended, and that may go on.
_STOPPED = ("CANCELLED", "PREEMPTED", "TIMEOUT", "DEADLINE", "REVOKED")


def open_scheduler(*, site: LoadedSite | None) -> Slurm:
    """Return the Slurm of a site; raises InputError without one."""
    if site is None:
        hint = "add --cluster SITE; `invoke cluster up` makes the site `local`"
        raise InputError("Slurm is at a site", place="--scheduler slurm", found="no --cluster", hint=hint)
    return Slurm(site)


class Slurm:
    """The scheduler of one site."""

    name = "slurm"

    def __init__(self, site: LoadedSite) -> None:
        self.site = site
        self._client = SlurmClient(site)

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

    def node_names(self, nodes: int) -> tuple[str, ...]:
        """Return one variable: all nodes start the same command."""
        return (f"${shell.NODE}",)

    def script(self, task: Task, *, run: str, logs: str) -> str:
        """Return the sbatch script of `task`; pure."""
        return batch_script(task, site=self.site, run=run, logs=logs)

    def submit(self, task: Task, *, run: Path, logs: Path, start: Start) -> SlurmJob:
        """Write the script of `task` to its logs and hand it to sbatch.

        Raises:
            InputError: sbatch refuses what cluster.toml says, or nodes do not see the run folder.
            MachineError: Slurm does not know this machine.
        """
        self._demand_shared(run)
        file = logs / SCRIPT
        write_atomically(file, self.script(task, run=str(run), logs=str(logs)))
        output = f"--output={str(logs).replace('%', '%%')}/launcher.log"
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

    def _demand_shared(self, run: Path) -> None:
        shared = self.site.site.shared
        if not any(run.is_relative_to(folder) for folder in shared):
            raise InputError(
                "the nodes do not see the run folder",
                place=f"{self.site.place}.shared",
                found=str(run),
                allowed=shared,
                hint="choose a folder below one of them with --out",
            )


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
            if now - self._answered > PATIENCE_SECONDS:
                raise self._silent(error) from None
            return None
        self._answered = now
        if state.nodes and not self._nodes:
            with contextlib.suppress(RunError):
                self._nodes = self._client.hosts(state.nodes)
        return self._status(state) if state.ended else None

    def logs(self) -> tuple[Path, ...]:
        """Return the files of the script and of each node, as far as they are there."""
        agents = sorted(self._logs.glob("launcher-*.log"), key=lambda path: (len(path.name), path.name))
        return tuple(path for path in (self._logs / "launcher.log", *agents) if path.exists())

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
        return state.status or int(state.state != "COMPLETED")

    def _client_down(self) -> str:
        try:
            listed = self._client.ask("sinfo", "--noheader", "--Node", "--states=down", "--format=%N %E")
        except RunError as error:
            return error.message
        return ", ".join(dict.fromkeys(listed.splitlines())) or "no node is down any more"

    def _silent(self, error: TwinrunError) -> RunError:
        return RunError(
            f"Slurm has not answered for {PATIENCE_SECONDS:.0f} s",
            place=self._point,
            found=str(error.found or error.message).strip(),
            hint=f"job {self._number} may still run: when Slurm is back, `scancel` it and --resume",
        )
