"""Schedulers, one module each: `open_scheduler` returns what gets nodes and starts a task on them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from twinrun.execution.engine import NodeCommand, ProcessGroup
from twinrun.execution.task import Abilities, Task
from twinrun.foundation.discovery import load_part
from twinrun.manifests.cluster import LoadedSite

# Starts a command on this machine with its output in a file, as the engine does it that rendered it.
Start = Callable[[NodeCommand, Path], ProcessGroup]


class Submission(Protocol):
    """A task that a scheduler has taken."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Host names of the nodes, in the order of the commands; empty while it waits for them."""

    @property
    def handle(self) -> str:
        """What `adopt` finds the task by in another process; empty for one that ends with this process."""

    def poll(self) -> int | None:
        """Return the exit status, of a command that failed if one did; None until all have ended."""

    def logs(self) -> tuple[Path, ...]:
        """Return the file that the command of each node prints to, as far as they are there."""

    def cancel(self) -> None:
        """End the commands and give the nodes back; returns when nothing is left, also if all had ended."""


@runtime_checkable
class Scheduler(Protocol):
    """What gives nodes."""

    name: str
    """Module of `schedulers`."""
    abilities: Abilities
    """What its allocations offer to a launcher."""

    @property
    def site(self) -> LoadedSite | None:
        """Where it is, None for this machine."""

    def demand(self) -> object:
        """Raise InputError where the site lacks what jobs need."""

    def size(self) -> int:
        """Return how many nodes are up; raises MachineError where the scheduler does not say."""

    def unusable(self, *, nodes: int) -> str | None:
        """Return why so many nodes cannot be had, or None."""

    def first_node(self) -> str:
        """Return what stands for the first node in the commands before the nodes are known."""

    def port(self) -> str:
        """Return the port on the first node at which the nodes meet, or the variable that has it."""

    def node_names(self, nodes: int) -> tuple[str, ...]:
        """Return what stands for the place of a node, once for each command that is written."""

    def script(self, task: Task, *, run: str, logs: str) -> str | None:
        """Return the script that starts `task`, None where no script does; pure.

        Args:
            run: the run folder.
            logs: folder for what the commands print.
        """

    def submit(self, task: Task, *, run: Path, logs: Path, start: Start) -> Submission:
        """Ask for nodes and have them start the commands of `task`.

        Args:
            start: what starts a command on this machine.

        Raises:
            InputError: the scheduler refuses what cluster.toml says.
            MachineError: so many nodes cannot be had, or a command cannot be started.
        """

    def adopt(self, handle: str, *, point: str, logs: Path) -> Submission:
        """Return a task that another process has submitted; raises MachineError where there are none."""


def load_scheduler(name: str, *, site: LoadedSite | None = None) -> Scheduler:
    """Return the scheduler called `name`; raises InputError when there is none, or the site lacks a key."""
    part: Any = load_part(sys.modules[__name__], name)
    scheduler: Scheduler = part.open_scheduler(site=site)
    scheduler.demand()
    return scheduler
