"""The scheduler of a site: one client and one job, whose words are Slurm's, PBS's or Grid Engine's."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from twinrun.execution.job_script import LOG, SET_UP_FAILED, STATUS_FILE, Dialect, JobScript, Start, Task
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.processes import end_of, last_lines, read_output
from twinrun.manifests.cluster import LoadedSite

_SCRIPT = "job.sh"
_ANSWER_SECONDS = 60
# A scheduler that restarts is silent for a moment; one that stays away is gone.
PATIENCE_SECONDS = 60.0
# Beyond the time in which Slurm kills what it has told to end.
CANCEL_SECONDS = 90.0
# A shared folder may show the status later than the scheduler forgets the job.
_SETTLE_SECONDS = 5.0
# Jobs that somebody or something else has ended, and that may go on; and those whose node went.
STOPPED = ("CANCELLED", "PREEMPTED", "TIMEOUT", "DEADLINE", "REVOKED")
LOST = ("NODE_FAIL", "BOOT_FAIL")
ENDLESS = float("1e18")
_AGAIN = "the same command with --resume runs the points that are left"


class SchedulerSilentError(RunError):
    """A scheduler does not answer; what it was given may still run."""


class JobState(Frozen):
    """What a scheduler knows of a job."""

    id: str
    name: str
    state: str
    """In the scheduler's own words, for example RUNNING."""
    reason: str = ""
    status: int = 0
    """Exit status of one that has ended; a negative one is a signal."""
    nodes: str = ""
    """Host names as the scheduler abbreviates them; empty while the job waits."""
    run_seconds: float = 0.0
    limit_seconds: float = ENDLESS
    user: str = ""
    ended: bool = False
    """Whether nothing of it runs any more."""


class NodeState(Frozen):
    """What jobs may use of a node, as the scheduler has it."""

    name: str
    up: bool = True
    cores: int
    memory_gib: int
    devices: dict[str, int] = Field(default_factory=dict)
    """Count of each generic resource, by its name in the scheduler: `gpu:mi250`."""
    partitions: tuple[str, ...] = ()


class BatchScheduler(Dialect):
    """One site: what its scheduler is asked, and the jobs that it takes."""

    name: str
    title: str
    """The product, in messages."""
    abilities: tuple[str, ...] = ()
    """What its allocation offers beside a command on each node: `steps`, where srun starts one process for
    each rank in it; `hosts`, where its script writes the hosts of a job to a file, for a starter of MPI."""
    leaves_status = False
    """Whether a job has ended when its script has left a status, whatever the scheduler says."""
    cancel_words: tuple[str, ...] = ("qdel",)

    def __init__(self, *, site: LoadedSite) -> None:
        """Take a site."""
        self.site = site

    # What each scheduler says in its own words.

    def submit_words(self, run: Path, logs: Path) -> tuple[str, ...]:
        """Return the command that takes a script, whose words are before it."""
        raise NotImplementedError

    def all_jobs(self) -> list[JobState]:
        """Return the jobs that the scheduler knows."""
        raise NotImplementedError

    def all_nodes(self) -> list[NodeState]:
        """Return the nodes that the scheduler knows."""
        raise NotImplementedError

    def version(self) -> str:
        """Return what the scheduler says of itself; raises MachineError where it does not answer."""
        raise NotImplementedError

    def longest(self, partition: str | None) -> tuple[str, float]:
        """Return the name of a partition, or of the default one, and the seconds that its jobs may take."""
        return partition or "any", ENDLESS

    def state(self, number: str) -> JobState | None:
        """Return the state of a job, None where the scheduler does not know it; raises MachineError."""
        return next((job for job in self.all_jobs() if job.id == number), None)

    def host_names(self, nodes: str) -> tuple[str, ...]:
        """Return host names of a job written out; empty where its script alone knows them."""
        return ()

    def accounts(self) -> list[str] | None:
        """Return the accounts that this user may charge; None where the scheduler keeps none."""
        return None

    def judged(self) -> str | None:
        """Let the scheduler judge a job without queueing it; None where it cannot. Raises MachineError."""
        return None

    def faults(self) -> str:
        """Return in words which nodes are out of service."""
        return ""

    # What all have in common.

    def ask(self, *arguments: str) -> str:
        """Return what a command of the scheduler prints.

        Raises:
            MachineError: it cannot be started, refuses, in its own words, or does not answer.
        """
        command, place = (*self.site.site.client, *arguments), self.site.place
        if shutil.which(command[0]) is None:
            hint = f"run twinrun where {self.title}'s commands are, or set {place}.client"
            raise MachineError("cannot start: no such program", place=command[0], hint=hint)
        try:
            return read_output(command, variables={}, folder=Path.cwd(), seconds=_ANSWER_SECONDS)
        except RunError as error:
            text = str(error.found or error.message).strip()
            raise MachineError(f"{self.title} refuses", place=arguments[0], found=text) from None

    def told(self, read: Callable[[str], Any], *command: str) -> Any:
        """Return what a command prints, as `read` reads it; raises MachineError where it cannot."""
        printed = self.ask(*command)
        try:
            return read(printed)
        except (ValueError, LookupError, AttributeError, SyntaxError):
            message, place = f"this is no answer of {self.title}", " ".join(command)
            raise MachineError(message, place=place, found=printed[:200]) from None

    def demand(self) -> None:
        """Raise InputError where jobs would get no device."""
        one, place = self.site.site, f"{self.site.place}.gres"
        if one.gpu and one.devices_by == "gres" and not one.gres:
            hint = 'add `gres`, the name that the scheduler has for a GPU, or `devices_by = "whole-node"`'
            raise InputError("a job of this site would get no GPU", place=place, found="missing", hint=hint)

    def jobs(self) -> list[JobState]:
        """Return the jobs of twinrun."""
        return [job for job in self.all_jobs() if job.name.startswith("twinrun-")]

    def nodes(self, partition: str | None = None) -> list[NodeState]:
        """Return the nodes of a partition, or of the site's, that are in service."""
        name = partition or self.site.site.partition
        nodes = (one for one in self.all_nodes() if one.up)
        return [one for one in nodes if not (name and one.partitions) or name in one.partitions]

    def end(self, number: str) -> None:
        """End a job; raises MachineError where the scheduler refuses."""
        self.ask(*self.cancel_words, number)

    def size(self) -> int:
        """Return how many nodes are up; raises MachineError where the scheduler does not answer."""
        return len({one.name for one in self.nodes()})

    def unusable(self, *, nodes: int) -> str | None:
        """Return why so many nodes cannot be had, or None."""
        found = self.size()
        many = f"the plan has points of up to {nodes} nodes, and {found} of the site are up"
        return many if nodes > found else None

    def memory_gib(self, task: Task) -> int | None:
        """Return the memory of a node that a job asks for: its devices' share where others use the rest.

        0 is all that a node has, None the partition's default.
        """
        one = self.site.site
        if task.ranks_per_node >= one.devices_per_node or one.exclusive or one.devices_by == "whole-node":
            return one.memory_gib
        return one.memory_gib * task.ranks_per_node // one.devices_per_node if one.memory_gib else None

    def one_node(self) -> Task:
        """Return a task for all devices of one node."""
        ranks, cores = self.site.site.devices_per_node, self.site.site.rank_cores
        return Task(point="doctor", nodes=1, ranks_per_node=ranks, cores_per_rank=cores, commands=())

    def script(self, task: Task, *, run: str, logs: str) -> str:
        """Return the script of `task`; pure."""
        return JobScript(task=task, run=run, logs=logs, dialect=self).text()

    def submit(self, task: Task, *, run: Path, logs: Path, start: Start) -> BatchJob:
        """Write the script of `task` to its logs and hand it to the scheduler.

        Raises:
            InputError: the scheduler refuses what cluster.toml says, or nodes do not see the run folder.
        """
        shared, place = self.site.site.shared, self.site.place
        if not any(run.is_relative_to(folder) for folder in shared):
            hint = "choose a folder below one of them with --out"
            message, found = "the nodes do not see the run folder", str(run)
            raise InputError(message, place=f"{place}.shared", found=found, allowed=shared, hint=hint)
        file, words = logs / _SCRIPT, self.submit_words(run, logs)
        write_atomically(file, self.script(task, run=str(run), logs=str(logs)))
        try:
            printed = self.ask(*words, str(file))
        except MachineError as error:
            found, hint = str(error.found or error.message), f"the options are the first lines of {file}"
            raise InputError(f"{words[0]} refuses the job", place=place, found=found, hint=hint) from None
        # Without the name of a federation's cluster.
        return self.adopt(printed.strip().partition(";")[0], point=task.point, logs=logs)

    def adopt(self, handle: str, *, point: str, logs: Path) -> BatchJob:
        """Return the job with the number `handle`."""
        return BatchJob(handle, scheduler=self, logs=logs, point=point)


class BatchJob:
    """A submitted job."""

    def __init__(self, number: str, *, scheduler: BatchScheduler, logs: Path, point: str) -> None:
        self.handle, self._scheduler, self._logs, self._point = number, scheduler, logs, point
        self._asked, self._answered = 0.0, time.monotonic()
        self._nodes: tuple[str, ...] = ()
        self._ended = False

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the host names of the nodes; empty while the job waits."""
        file = self._logs / "hosts"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return self._nodes or tuple(line.split()[0] for line in lines if line.strip())

    def logs(self) -> tuple[Path, ...]:
        """Return the files of the script and of each node, as far as they are there."""
        agents = sorted(self._logs.glob("launcher-*.log"), key=lambda path: (len(path.name), path.name))
        return tuple(path for path in (self._logs / LOG, *agents) if path.exists())

    def poll(self) -> int | None:
        """Return the exit status, None until the job has ended; asks no oftener than the site wants.

        Raises:
            Interrupted: the job was cancelled, preempted, out of time, or ended without a status.
            RunError: a node died, a set-up line failed, or the scheduler has not answered for a minute.
        """
        scheduler, now = self._scheduler, time.monotonic()
        if now - self._asked < scheduler.site.site.poll_seconds:
            return None
        self._asked = now
        try:
            left = scheduler.leaves_status and self._written() is not None
            state = None if left else scheduler.state(self.handle)
        except MachineError as error:
            if now - self._answered < PATIENCE_SECONDS:
                return None
            found = str(error.found or error.message).strip()
            message = f"{scheduler.title} has not answered for {PATIENCE_SECONDS:.0f} s"
            hint = f"job {self.handle} may still run: --resume goes on with it"
            raise SchedulerSilentError(message, place=self._point, found=found, hint=hint) from None
        self._answered = now
        if state and not self._nodes:
            with contextlib.suppress(MachineError):
                self._nodes = scheduler.host_names(state.nodes)
        if state and not state.ended:
            return None
        self._ended = True
        status = self._status_of(state) if state else self._left()
        if status == SET_UP_FAILED:
            message, place = "a set-up line of the site failed, and no rank was started", scheduler.site.place
            hint = "the same line in a job of your own shows more; --dry prints the script"
            found = last_lines("\n".join(map(end_of, self.logs())))
            raise RunError(message, place=f"{place}.setup", found=found, hint=hint)
        return status

    def _written(self) -> int | None:
        """Return the exit status that the script has left, None where it did not come to its end."""
        file = self._logs / STATUS_FILE
        text = file.read_text(encoding="ascii", errors="replace").strip() if file.is_file() else ""
        return int(text) if text.isdecimal() else None

    def _left(self) -> int:
        """Return the status of a job that the scheduler does not know any more, as its script has left it."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (status := self._written()) is None and time.monotonic() < deadline:
            time.sleep(0.2)
        if status is None:
            found = f"{self._scheduler.title} does not know it: cancelled, out of time, or without its node"
            message = f"job {self.handle} ended without an exit status"
            raise RunInterruptedError(message, place=self._point, found=found, hint=_AGAIN)
        return status

    def _status_of(self, state: JobState) -> int:
        late = state.limit_seconds - self._scheduler.site.site.signal_seconds - 1
        if state.state in STOPPED or (state.status and state.run_seconds >= late):
            found = f"{state.reason}, after {state.run_seconds:.0f} s on {state.nodes or 'no node'}"
            message = f"job {state.id} was ended: {state.state}"
            raise RunInterruptedError(message, place=self._point, found=found, hint=_AGAIN)
        if state.state in LOST:
            found = f"of {state.nodes}: {self._scheduler.faults() or 'no node is down any more'}"
            hint = "after mending it, or with it in `exclude` of cluster.toml, --resume goes on"
            message = f"job {state.id} lost a node: {state.state}"
            raise RunError(message, place=self._point, found=found, hint=hint)
        return state.status or int(state.state != "COMPLETED")

    def cancel(self) -> None:
        """End the job and wait until its nodes are given back; one that has ended is no error."""
        deadline = time.monotonic() + CANCEL_SECONDS
        # A scheduler that is gone can be asked for nothing; its nodes end the job at its time limit.
        with contextlib.suppress(MachineError):
            if not self._ended:
                with contextlib.suppress(MachineError):
                    self._scheduler.end(self.handle)
            while not self._ended and time.monotonic() < deadline:
                state = self._scheduler.state(self.handle)
                self._ended = state is None or state.ended
                time.sleep(0 if self._ended else min(0.5, self._scheduler.site.site.poll_seconds))


def seconds_of(text: str) -> float:
    """Return a time as schedulers print it, `1-02:03:04` or `02:03:04`; any other text has no end."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    days, hours, minutes, seconds = (int(one or 0) for one in found.groups()) if found else (0, 0, 0, 0)
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds if found else ENDLESS


def gib_of(text: str) -> int:
    """Return a size as schedulers print it, `515000000kb` or `7.6G`, in whole GiB."""
    found = re.fullmatch(r"([\d.]+)\s*([kmgt]?)b?", text.strip().lower())
    return int(float(found[1]) * 1024 ** " kmgt".index(found[2] or " ")) >> 30 if found else 0
