"""Schedulers, one module each: `submit` gets the nodes and starts a command on each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from twinrun.execution.engine import NodeCommand, Running
from twinrun.foundation.discovery import load_part

# Starts a command on this machine with its output in a file, as the engine does it that rendered it.
Start = Callable[[NodeCommand, Path], Running]


class Submission(Protocol):
    """Commands that a scheduler has taken, one a node."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Host names of the nodes, in the order of the commands; empty while it waits for them."""

    def poll(self) -> int | None:
        """Return the exit status, of the first command that failed if one did; None until all have ended."""

    def logs(self) -> tuple[Path, ...]:
        """Return the file that the command of each node prints to, as far as they are there."""

    def cancel(self) -> None:
        """End the commands and give the nodes back; returns when nothing is left, also if all had ended."""


@runtime_checkable
class Scheduler(Protocol):
    """What each module here offers."""

    def unusable(self, *, nodes: int) -> str | None:
        """Return why so many nodes cannot be had, or None."""

    def available_nodes(self) -> tuple[str, ...]:
        """Return the host names of the nodes that could be given now."""

    def first_node(self) -> str:
        """Return what stands for the first node in the commands before the nodes are known."""

    def submit(self, commands: Sequence[NodeCommand], *, name: str, logs: Path, start: Start) -> Submission:
        """Ask for as many nodes as there are commands, and have each start its own.

        Args:
            name: what users see in the scheduler's lists.
            logs: folder for what the commands print.
            start: what starts a command on this machine.

        Raises:
            MachineError: so many nodes cannot be had, or a command cannot be started.
        """


def load_scheduler(name: str) -> Scheduler:
    """Return the scheduler called `name`; raises InputError when there is none."""
    part: Any = load_part(sys.modules[__name__], name)
    scheduler: Scheduler = part
    return scheduler
