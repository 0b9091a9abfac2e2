"""This machine, which is one node."""

from __future__ import annotations

import platform
from pathlib import Path

from twinrun.execution.task import Abilities, Start, Task
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.processes import LocalProcess
from twinrun.manifests.cluster import LoadedSite


class Local:
    """The scheduler of one machine, which starts at once."""

    name = "local"
    abilities = Abilities()
    site = None
    first_node, port = "localhost", "29400"

    def __init__(self, *, site: LoadedSite | None = None) -> None:
        """Take no site; raises InputError for one."""
        if site is not None:
            found = f"--cluster {site.name}"
            hint = f"leave one out; the site has --scheduler {site.site.scheduler}"
            raise InputError("this machine is no site", place="--scheduler local", found=found, hint=hint)

    def demand(self) -> None:
        """Ask for nothing."""

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
        """Start the one command here.

        Raises:
            MachineError: there are several, or it cannot be started.
        """
        if task.nodes > 1:
            found = f"{task.point} needs {task.nodes} nodes"
            hint = "print the plan with --dry, or use --scale node"
            raise MachineError("this machine is one node", place="--scheduler local", found=found, hint=hint)
        log = logs / "launcher.log"
        return LocalSubmission(start(task.commands[0], log), log)

    def adopt(self, handle: str, *, point: str, logs: Path) -> LocalSubmission:
        """Raise MachineError: what runs here ends with the process that started it."""
        raise MachineError("no job of this machine goes on by itself", place=point, found=handle)


class LocalSubmission:
    """The command of this machine."""

    def __init__(self, running: LocalProcess, log: Path) -> None:
        self._running, self._log, self.handle = running, log, ""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return this machine."""
        return (platform.node(),)

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._running.poll()

    def logs(self) -> tuple[Path, ...]:
        """Return the file that the command prints to."""
        return (self._log,) if self._log.exists() else ()

    def cancel(self) -> None:
        """End the command."""
        self._running.stop()
