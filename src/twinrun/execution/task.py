"""What a scheduler is asked to start for one point, and what it can do for a launcher."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from twinrun.execution.engine import NodeCommand, ProcessGroup
from twinrun.foundation.manifest import Frozen

# Starts a command on this machine with its output in a file, as the engine does it that rendered it.
Start = Callable[[NodeCommand, Path], ProcessGroup]


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
