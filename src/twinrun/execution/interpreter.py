"""Commands under a Python interpreter of this machine, as the engines without a container run them."""

from __future__ import annotations

import os

from twinrun.execution.engine import PYTHON, Command, NodeCommand, Workspace
from twinrun.execution.local_commands import LocalCommands
from twinrun.foundation.cache import bytecode_folder


class Interpreter(LocalCommands):
    """An engine whose commands run under one interpreter of this machine."""

    image_digest: str | None = None

    def __init__(self, *, python: str, workspace: Workspace, search_path: str = "") -> None:
        """Take the interpreter at `python`; `search_path` goes behind the project in PYTHONPATH."""
        self._python = python
        self._workspace = workspace
        self._search_path = search_path

    def render(self, command: Command) -> NodeCommand:
        """Return `command` under the interpreter, with the project on its search path."""
        assert command.arguments[0] == PYTHON
        own = self._workspace.search_path
        # Bytecode elsewhere: a read-only checkout works and stays clean, and not every rank compiles again.
        variables = {
            "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, own), self._search_path])),
            "PYTHONPYCACHEPREFIX": str(bytecode_folder()),
            "PYTHONDONTWRITEBYTECODE": "",
            **command.variables,
        }
        return NodeCommand(
            arguments=(self._python, *command.arguments[1:]), variables=variables, folder=self._workspace.root
        )
