"""This machine, which is one node."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from twinrun.execution.engine import NodeCommand, Running
from twinrun.execution.schedulers import Start
from twinrun.foundation.errors import MachineError


def unusable(*, nodes: int) -> str | None:
    """Return why so many nodes cannot be had, or None."""
    return f"the plan has points of up to {nodes} nodes" if nodes > 1 else None


def available_nodes() -> tuple[str, ...]:
    """Return this machine."""
    return (platform.node(),)


def first_node() -> str:
    """Return the name under which this machine finds itself."""
    return "localhost"


def submit(commands: Sequence[NodeCommand], *, name: str, logs: Path, start: Start) -> LocalSubmission:
    """Start the one command here.

    Raises:
        MachineError: there are several, or it cannot be started.
    """
    if len(commands) > 1:
        raise MachineError(
            "this machine is one node",
            place="--scheduler local",
            found=f"{name} needs {len(commands)} nodes",
            hint="print the plan with --dry, or use --scale node",
        )
    log = logs / "launcher.log"
    return LocalSubmission(start(commands[0], log), log)


class LocalSubmission:
    """The command of this machine."""

    def __init__(self, running: Running, log: Path) -> None:
        self._running = running
        self._log = log

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return this machine."""
        return available_nodes()

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._running.poll()

    def logs(self) -> tuple[Path, ...]:
        """Return the file that the command prints to."""
        return (self._log,) if self._log.exists() else ()

    def cancel(self) -> None:
        """End the command."""
        self._running.stop()
