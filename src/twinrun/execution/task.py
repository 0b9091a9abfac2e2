"""What a scheduler is asked to start for one point."""

from __future__ import annotations

from twinrun.execution.engine import NodeCommand
from twinrun.foundation.manifest import Frozen


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
