"""Schedulers: what gets nodes and starts a task on them; this machine, and a module each."""

from __future__ import annotations

import platform
from pathlib import Path

from twinrun.execution.batch import BatchJob, BatchScheduler
from twinrun.execution.job_script import Start, Task
from twinrun.execution.schedulers.gridengine import GridEngine
from twinrun.execution.schedulers.pbs import Pbs
from twinrun.execution.schedulers.skypilot import SkyPilot
from twinrun.execution.schedulers.slurm import Slurm
from twinrun.foundation.errors import InputError, MachineError, require_known
from twinrun.foundation.processes import LocalProcess
from twinrun.manifests.cluster import LoadedSite


class Local:
    """The scheduler of one machine, which starts at once."""

    name, site = "local", None
    abilities: tuple[str, ...] = ()
    first_node, port = "localhost", "29400"

    def size(self) -> int:
        """Return one: this machine."""
        return 1

    def unusable(self, *, nodes: int) -> str | None:
        """Return why so many nodes cannot be had, or None."""
        return f"the plan has points of up to {nodes} nodes" if nodes > 1 else None

    def node_names(self, nodes: int) -> tuple[str, ...]:
        """Return the number of each node."""
        return tuple(map(str, range(nodes)))

    def script(self, task: Task, *, run: str, logs: str) -> str | None:
        """Return None: the command is started as it is."""
        return None

    def submit(self, task: Task, *, run: Path, logs: Path, start: Start) -> LocalSubmission:
        """Start the one command here; raises MachineError for several, or where it cannot be started."""
        if task.nodes > 1:
            found, place = f"{task.point} needs {task.nodes} nodes", "--scheduler local"
            hint = "print the plan with --dry, or use --scale node"
            raise MachineError("this machine is one node", place=place, found=found, hint=hint)
        return LocalSubmission(start(task.commands[0], logs / "launcher.log"), logs / "launcher.log")

    def adopt(self, handle: str, *, point: str, logs: Path) -> LocalSubmission:
        """Raise MachineError: what runs here ends with the process that started it."""
        raise MachineError("no job of this machine goes on by itself", place=point, found=handle)


class LocalSubmission:
    """The command of this machine."""

    def __init__(self, running: LocalProcess, log: Path) -> None:
        self.poll, self.cancel, self._log, self.handle = running.poll, running.stop, log, ""
        self.nodes: tuple[str, ...] = (platform.node(),)

    def logs(self) -> tuple[Path, ...]:
        """Return the file that the command prints to."""
        return (self._log,) if self._log.exists() else ()


Scheduler = Local | BatchScheduler
# A task that a scheduler has taken.
Submission = LocalSubmission | BatchJob
_BATCH: dict[str, type[BatchScheduler]] = {one.name: one for one in (GridEngine, Pbs, SkyPilot, Slurm)}
SCHEDULERS: dict[str, type[Scheduler]] = {Local.name: Local, **_BATCH}


def load_scheduler(name: str, *, site: LoadedSite | None = None) -> Scheduler:
    """Return the scheduler called `name`; raises InputError when there is none, or the site lacks a key."""
    require_known(name, SCHEDULERS, "unknown scheduler", place="--scheduler")
    if site is None and name == Local.name:
        return Local()
    if site is None or name == Local.name:
        message = "this machine is no site" if site else f"{name} is at a site"
        found = f"--cluster {site.name}" if site else "no --cluster"
        hint = "jobs are for a --cluster of cluster.toml; `invoke cluster up` makes the site `local`"
        raise InputError(message, place=f"--scheduler {name}", found=found, hint=hint)
    client = _BATCH[name](site=site)
    client.demand()
    return client


def client_of(site: LoadedSite) -> BatchScheduler:
    """Return what the scheduler of a site is asked through, whatever its jobs would lack."""
    name = site.site.scheduler
    require_known(name, _BATCH, "no scheduler of jobs", place=f"{site.place}.scheduler")
    return _BATCH[name](site=site)
