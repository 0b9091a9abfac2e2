"""Commands as processes of this machine, for engines without a daemon."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from twinrun.execution.engine import Command, NodeCommand
from twinrun.foundation.processes import LocalProcess, read_output


class LocalCommands(ABC):
    """The part of an engine that starts what it renders, as the user who runs twinrun."""

    @abstractmethod
    def render(self, command: Command) -> NodeCommand:
        """Return the process that `command` becomes."""

    def inside(self, path: Path) -> str:
        """Return `path` itself: processes see folders under their own paths."""
        return str(path)

    def start(self, command: NodeCommand, *, log: Path) -> LocalProcess:
        """Start `command` with its output in `log`."""
        return LocalProcess(command.arguments, variables=command.variables, folder=command.folder, log=log)

    def read(self, command: Command) -> str:
        """Run a short `command` and return its standard output; raises RunError."""
        rendered = self.render(command)
        return read_output(rendered.arguments, variables=rendered.variables, folder=rendered.folder)
