"""Placements and commands that tests of launchers, schedulers and ranks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twinrun.execution.engine import Command, NodeCommand


@dataclass(frozen=True, kw_only=True)
class Ranked:
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
