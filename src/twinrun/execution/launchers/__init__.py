"""Launchers, one module each: `render` starts a command once per rank or per node of a placement."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from twinrun.execution import shell
from twinrun.execution.engine import Command, NodeCommand
from twinrun.execution.task import Abilities
from twinrun.foundation.discovery import load_part
from twinrun.foundation.manifest import Frozen


class RankPlacement(Protocol):
    """Where the ranks of one point go."""

    @property
    def id(self) -> str:
        """Name of the point."""

    @property
    def nodes(self) -> int:
        """Machines."""

    @property
    def devices_per_node(self) -> int:
        """Ranks of each machine, one a device."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""


class Rendezvous(Frozen):
    """Where and under which name the nodes of one start meet."""

    first_node: str
    """Name of the node with the first rank, as the others resolve it."""
    port: str
    """A number, or the variable of a script that has it."""
    id: str
    """Unlike that of every other start."""


class Culprit(NamedTuple):
    """The rank that failed first."""

    rank: int
    status: int
    """Exit status; a negative one is a signal."""


@runtime_checkable
class Launcher(Protocol):
    """What each module here offers."""

    IDENTITY: tuple[str, str] | None
    """Variables with the rank of a process and its rank on its node, where `starter` starts the ranks."""

    def unusable(self, abilities: Abilities) -> str | None:
        """Return why ranks cannot be started on what a scheduler with these abilities gives, or None."""

    def render(
        self,
        command: Command,
        *,
        placement: RankPlacement,
        node: str,
        rendezvous: Rendezvous,
        logs: str,
        cores: int,
        in_stack: Callable[[Command], NodeCommand],
    ) -> NodeCommand:
        """Return what is started on one node so that every rank of it runs `command`; pure.

        Args:
            node: place of the node among those of the allocation, or what stands for it.
            logs: folder for a log of each rank, as the ranks see it.
            cores: CPU cores that the ranks of the node share.
            in_stack: the engine's `render`; a launcher of the stack goes inside, one of the node around it.
        """

    def starter(self, placement: RankPlacement, *, cores: int) -> tuple[str, ...]:
        """Return the words that start a command for every rank from the first node; empty for one a node.

        Args:
            cores: CPU cores of each rank.
        """

    def culprit(self, logs: Sequence[str]) -> Culprit | None:
        """Return the rank that failed first, as the outputs of the nodes' commands name it."""


def load_launcher(name: str) -> Launcher:
    """Return the launcher called `name`; raises InputError when there is none."""
    part: Any = load_part(sys.modules[__name__], name)
    launcher: Launcher = part
    return launcher


def node_logs(logs: str, *, placement: RankPlacement, node: str) -> str:
    """Return the folder for the logs of a node's ranks; below it a launcher counts ranks from 0."""
    return f"{logs}/node-{node}" if placement.nodes > 1 else logs


def thread_variables(placement: RankPlacement, cores: int) -> dict[str, str]:
    """Return the variables that share the cores of a node between its ranks."""
    return {
        "OMP_NUM_THREADS": str(max(1, cores // placement.devices_per_node)),
        # Threads that spin while they wait take the cores from whatever else runs here: with two busy
        # processes beside it, one CPU rank took 2.2 s a step instead of 0.37.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def started_by_rank(
    command: Command, *, placement: RankPlacement, rendezvous: Rendezvous, cores: int
) -> Command:
    """Return `command` with what torch.distributed reads, for a launcher that starts it once per rank."""
    variables = {
        **thread_variables(placement, cores),
        "RANK": f"${shell.RANK}",
        "LOCAL_RANK": f"${shell.LOCAL_RANK}",
        "GROUP_RANK": f"${shell.NODE}",
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.devices_per_node),
        "MASTER_ADDR": rendezvous.first_node,
        "MASTER_PORT": rendezvous.port,
        **command.variables,
    }
    return command.model_copy(update={"variables": variables, "reaches_nodes": placement.nodes > 1})
