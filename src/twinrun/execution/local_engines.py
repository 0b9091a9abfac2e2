"""What engines without a daemon have in common: an interpreter, or an image that is one file."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, NodeCommand, Workspace
from twinrun.foundation.cache import bytecode_folder, cache_root
from twinrun.foundation.processes import LocalProcess, read_output
from twinrun.manifests.cluster import Bind
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor

TEMPORARY_FOLDER = "/tmp"  # noqa: S108


class LocalCommands(ABC):
    """The part of an engine that starts what it renders, as the user who runs twinrun."""

    @abstractmethod
    def render(self, command: Command) -> NodeCommand:
        """Return the process that `command` becomes."""

    def inside(self, path: Path) -> str:
        """Return `path` itself: processes see folders under their own paths."""
        return str(path)

    def changed_files(self, *, whole: bool = False) -> dict[str, str]:  # noqa: ARG002
        """Return nothing: only an environment of ours is known file by file."""
        return {}

    def start(self, command: NodeCommand, *, log: Path) -> LocalProcess:
        """Start `command` with its output in `log`."""
        return LocalProcess(command.arguments, variables=command.variables, folder=command.folder, log=log)

    def read(self, command: Command) -> str:
        """Run a short `command` and return its standard output; raises RunError."""
        rendered = self.render(command)
        return read_output(rendered.arguments, variables=rendered.variables, folder=rendered.folder)


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


def image_file(stack: LoadedStack, *, form: str) -> Path:
    """Return the file, in the format `form`, of the image that is made of the stack's inputs."""
    return cache_root() / form / f"{stack.stack.name}-{stack.inputs_sha256[:12]}.{form}"


class ImageFile:
    """An image file, and the folders that its processes see, each under its own path."""

    def __init__(self, *, file: Path, vendor: Vendor, workspace: Workspace) -> None:
        self._file = file
        self._vendor = vendor
        self._workspace = workspace

    def inside(self, path: Path) -> str:
        """Return `path` itself."""
        return str(path)

    def _variables(self, command: Command, **more: str) -> dict[str, str]:
        """Return the environment of `command`, its own variables last."""
        assert command.arguments[0] == PYTHON
        return {
            "PYTHONDONTWRITEBYTECODE": "1",
            # Without them the interpreter would find packages of the user and of the node.
            "PYTHONNOUSERSITE": "1",
            **more,
            "PYTHONPATH": ":".join(map(str, self._workspace.search_path)),
            **command.variables,
        }

    def _mounts(self, command: Command) -> Iterator[Bind]:
        """Yield each folder, with `rw` where `command` may write to it, else `ro`."""
        workspace = self._workspace
        data = "rw" if command.writes_data else "ro"
        folders = [(workspace.root, "ro"), (workspace.data, data), (workspace.run, "rw")]
        folders += [(folder, "ro") for folder in (workspace.recipe, workspace.source) if folder]
        for folder, mode in folders:
            yield Bind(host=str(folder), inside=str(folder), mode="rw" if mode == "rw" else "ro")
        if workspace.nodes:
            yield from workspace.nodes.bound
