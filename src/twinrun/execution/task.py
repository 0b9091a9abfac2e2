"""What a scheduler is asked to start for one point, and what a run has submitted and not collected yet."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from twinrun.execution.engine import NodeCommand
from twinrun.foundation.errors import RunError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.foundation.processes import LocalProcess

# Holds a file for each point that waits to be collected, so that another process goes on with it.
FOLDER = "jobs"
# Starts a command on this machine with its output in a file, as the engine does it that rendered it.
Start = Callable[[NodeCommand, Path], LocalProcess]


class Abilities(Frozen):
    """What the allocation of a scheduler offers; one that offers nothing starts a command on each node."""

    steps: bool = False
    """Whether srun starts one process for each rank in it."""
    hosts: bool = False
    """Whether its script writes the hosts of a job to a file, for a starter of MPI."""


class Task(Frozen):
    """What is started for one point."""

    point: str
    nodes: int
    ranks_per_node: int
    cores_per_rank: int = 1
    commands: tuple[NodeCommand, ...]
    """One for each of `node_names`, or the one that `starter` starts for every rank."""
    starter: tuple[str, ...] = ()
    """Words of the launcher before a command; empty where each node starts its own."""
    identity: tuple[str, str] | None = None
    """Variables in which the starter tells each process its rank, and its rank on its node."""

    @property
    def job_name(self) -> str:
        """Return the name of a job, in which no scheduler finds a letter that it refuses."""
        return f"twinrun-{re.sub(r'[^A-Za-z0-9_.=@-]', '_', self.point)[:60]}"


class SchedulerSilentError(RunError):
    """A scheduler does not answer; what it was given may still run."""


class Pending(Frozen):
    """A launch that a scheduler has taken."""

    point: str
    place: int
    """Which of the attempts of the plan it is, counted from 0."""
    attempt: str
    """What the lines of its metrics carry."""
    scheduler: str
    site: str
    handle: str
    """How the scheduler calls it."""
    detached: bool
    """Whether it goes on when the process that follows it is interrupted."""


def remember(run: Path, pending: Pending) -> None:
    """Write that a launch was submitted, whole or not at all."""
    write_atomically(_file(run, pending.point), pending.model_dump_json() + "\n")


def forget_pending(run: Path, point: str) -> None:
    """Remove what was written of a launch that has been collected, or will never be."""
    _file(run, point).unlink(missing_ok=True)


def pending_of(run: Path, point: str) -> Pending | None:
    """Return what was submitted for a point and not collected, None where there is nothing."""
    file = _file(run, point)
    return load_json(file, Pending) if file.is_file() else None


def all_pending(run: Path) -> tuple[Pending, ...]:
    """Return all that a run has submitted and not collected."""
    return tuple(load_json(file, Pending) for file in sorted((run / FOLDER).glob("*.json")))


def _file(run: Path, point: str) -> Path:
    return run / FOLDER / f"{point}.json"
