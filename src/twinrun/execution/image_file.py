"""A stack's image as one file on a disk that the nodes share: what its engines have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Workspace
from twinrun.foundation.cache import cache_root
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor

TEMPORARY_FOLDER = "/tmp"  # noqa: S108


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

    def _mounts(self, command: Command) -> Iterator[tuple[Path, str]]:
        """Yield each folder, with `rw` where `command` may write to it, else `ro`."""
        workspace = self._workspace
        data = "rw" if command.writes_data else "ro"
        yield from ((workspace.root, "ro"), (workspace.data, data), (workspace.run, "rw"))
        if workspace.source:
            yield workspace.source, "ro"
