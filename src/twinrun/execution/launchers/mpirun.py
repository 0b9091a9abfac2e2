"""mpirun of OpenMPI: it starts the ranks, which meet as those of torchrun do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from twinrun.execution import shell
from twinrun.execution.engine import Command, NodeCommand
from twinrun.execution.launchers import Culprit, RankPlacement, Rendezvous, started_by_rank
from twinrun.execution.task import Abilities

IDENTITY = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_LEFT = re.compile(r"^\s*Process name: \[.*?,(\d+)\]\s*\n\s*Exit code:\s+(\d+)", re.MULTILINE)
_SIGNALLED = re.compile(r"process rank (\d+) with PID \d+ .*?\s+exited on\s+signal (\d+)", re.DOTALL)


def unusable(abilities: Abilities) -> str | None:
    """Return why this launcher cannot start ranks with such abilities of the scheduler, or None."""
    return None if abilities.hosts else "mpirun starts ranks where a scheduler names the hosts of its job"


def render(
    command: Command,
    *,
    placement: RankPlacement,
    node: str,
    rendezvous: Rendezvous,
    logs: str,
    cores: int,
    in_stack: Callable[[Command], NodeCommand],
) -> NodeCommand:
    """Return the command of one rank, which mpirun starts on every node."""
    return in_stack(started_by_rank(command, placement=placement, rendezvous=rendezvous, cores=cores))


def starter(placement: RankPlacement, *, cores: int) -> tuple[str, ...]:
    """Return the mpirun that starts one process for each rank, those of a node side by side."""
    return (
        *("mpirun", "--hostfile", "$TWINRUN_HOSTS", "-n", str(placement.world_size)),
        *("--map-by", f"ppr:{placement.devices_per_node}:node", "--bind-to", "none"),
        # Slurm starts its daemons. As root, which a user of containers may be, it wants to be told.
        *("--allow-run-as-root", "-x", "RUN", "-x", shell.FIRST_NODE),
    )


def culprit(logs: Sequence[str]) -> Culprit | None:
    """Return the process that mpirun names as the one that ended it."""
    for log in logs:
        if found := _SIGNALLED.search(log):
            return Culprit(int(found[1]), -int(found[2]))
        if found := _LEFT.search(log):
            return Culprit(int(found[1]), int(found[2]))
    return None
