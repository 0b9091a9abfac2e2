"""The stack's image as one file under Pyxis: srun starts every command inside it, as the user who asks.

Only written: `--dry` prints the scripts, golden files hold them, and no machine of ours has run one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Engine, NodeCommand, Workspace
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, MachineError
from twinrun.machine.inventory import Vendor
from twinrun.manifests.stack import LoadedStack

RUNS_IMAGES = True
_TEMPORARY_FOLDER = "/tmp"  # noqa: S108
_WRITTEN = "commands for Pyxis are only written"


def unusable(*, stack: LoadedStack, vendor: Vendor) -> str:
    """Return why no command is started."""
    return _WRITTEN


def image_file(stack: LoadedStack) -> Path:
    """Return the file of the image that is made of the stack's inputs."""
    return cache_root() / "sqsh" / f"{stack.stack.name}-{stack.inputs_sha256[:12]}.sqsh"


def renderer(*, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> PyxisRenderer:
    """Return what writes the commands, whether the file is there or not."""
    return PyxisRenderer(file=image_file(stack), vendor=vendor, workspace=workspace)


def open_engine(
    *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Callable[[str], None]
) -> Engine:
    """Raise MachineError: what prepares data and reads versions would need the image on this machine."""
    source = f"`enroot import --output {image_file(stack)} dockerd://{stack.image()}` makes the file"
    raise MachineError(
        _WRITTEN,
        place="--engine pyxis",
        hint=f"--dry prints the sbatch script of each point; {source} where the image is",
    )


class PyxisRenderer:
    """Writes commands as they are inside the image, with the options of srun that lead there."""

    def __init__(self, *, file: Path, vendor: Vendor, workspace: Workspace) -> None:
        """Take an image file and the folders that its processes see, each under its own path."""
        self._file = file
        self._vendor = vendor
        self._workspace = workspace

    def inside(self, path: Path) -> str:
        """Return `path` itself."""
        return str(path)

    def render(self, command: Command) -> NodeCommand:
        """Return `command` with what srun is told; raises InputError for a folder that it cannot name."""
        assert command.arguments[0] == PYTHON
        own = (self._workspace.root / "src", *self._workspace.packages)
        variables = {
            "PYTHONDONTWRITEBYTECODE": "1",
            # Without them the interpreter would find packages of the user and of the node.
            "PYTHONNOUSERSITE": "1",
            # The user's own is not there, and compilers write below it.
            "HOME": _TEMPORARY_FOLDER,
            "PYTHONPATH": ":".join(map(str, own)),
            **command.variables,
        }
        mounts = ",".join(self._mounts(command))
        return NodeCommand(
            arguments=("python3", *command.arguments[1:]),
            variables=variables,
            folder=self._workspace.root,
            srun_options=(
                *(f"--container-image={self._file}", f"--container-mounts={mounts}", "--container-readonly"),
                *("--no-container-mount-home", "--no-container-remap-root", "--no-container-entrypoint"),
            ),
            srun_variables=self._vendor.container.enroot,
        )

    def _mounts(self, command: Command) -> Iterator[str]:
        workspace = self._workspace
        data = "rw" if command.writes_data else "ro"
        for folder, mode in ((workspace.root, "ro"), (workspace.data, data), (workspace.run, "rw")):
            if set(",: ") & set(str(folder)):
                raise InputError(
                    "no mount of Pyxis can name this folder",
                    place="--engine pyxis",
                    found=str(folder),
                    allowed="a path without comma, colon and space",
                )
            yield f"{folder}:{folder}:{mode}"
