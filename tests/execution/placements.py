"""Placements and commands that tests of launchers, schedulers and ranks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twinrun.execution.engine import Command, NodeCommand
from twinrun.manifests.cluster import LoadedSite, Site

# A site with everything that a job can say.
SITE = LoadedSite(
    name="hpc",
    place="cluster.toml:site.hpc",
    site=Site(
        scheduler="slurm",
        vendor="cpu",
        nodes=1024,
        devices_per_node=8,
        cores_per_node=64,
        partition="gpu",
        account="research",
        qos="high",
        minutes=90,
        gres="gpu:h100",
        parallel_environment="mpi",
        exclude=("node3", "node[7-9]"),
        requeue=True,
        signal_seconds=120,
        interfaces=("ib0", "ib1"),
        shared=("/shared",),
    ),
)


@dataclass(frozen=True, kw_only=True)
class PlacementStandIn:
    """A placement."""

    id: str = "here"
    nodes: int = 1
    devices_per_node: int = 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node


def command_of(render: Callable[[Callable[[Command], NodeCommand]], NodeCommand]) -> Command:
    """Return what `render` hands to its engine."""
    handed: list[Command] = []

    def in_stack(command: Command) -> NodeCommand:
        handed.append(command)
        return NodeCommand(arguments=command.arguments, variables=command.variables, folder=Path("/project"))

    render(in_stack)
    (command,) = handed
    return command
