"""The stack's image as one file under Pyxis: srun starts every command inside it, as the user who asks.

Only written: `--dry` prints the scripts, golden files hold them, and no machine of ours has run one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from twinrun.execution.engine import Command, Engine, NodeCommand, Workspace
from twinrun.execution.local_engines import TEMPORARY_FOLDER, ImageFile, image_file
from twinrun.foundation.errors import InputError, MachineError
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor

RUNS_IMAGES = True
ADDS_GROUPS = False
FORM = "sqsh"
# On which Enroot's hook for Mellanox passes the adapters on.
_ADAPTERS = {"MELLANOX_VISIBLE_DEVICES": "all"}
_WRITTEN = "commands for Pyxis are only written"


def unusable(*, stack: LoadedStack, vendor: Vendor) -> str:
    """Return why no command is started."""
    return _WRITTEN


def renderer(*, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> PyxisRenderer:
    """Return what writes the commands, whether the file is there or not."""
    return PyxisRenderer(file=image_file(stack, form=FORM), vendor=vendor, workspace=workspace)


def open_engine(
    *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Callable[[str], None]
) -> Engine:
    """Raise MachineError: what prepares data and reads versions would need the image on this machine."""
    source = (
        f"`enroot import --output {image_file(stack, form=FORM)} dockerd://{stack.image()}` makes the file"
    )
    raise MachineError(
        _WRITTEN,
        place="--engine pyxis",
        hint=f"--dry prints the sbatch script of each point; {source} where the image is",
    )


class PyxisRenderer(ImageFile):
    """Writes commands as they are inside the image, with the options of srun that lead there."""

    def render(self, command: Command) -> NodeCommand:
        """Return `command` with what srun is told; raises InputError for a folder that it cannot name."""
        mounts = ",".join(self._container_mounts(command))
        fabric = self._workspace.nodes is not None and self._workspace.nodes.infiniband
        return NodeCommand(
            arguments=("python3", *command.arguments[1:]),
            # The user's own home is not there, and compilers write below it.
            variables=self._variables(command, HOME=TEMPORARY_FOLDER),
            folder=self._workspace.root,
            srun_options=(
                *(f"--container-image={self._file}", f"--container-mounts={mounts}", "--container-readonly"),
                *("--no-container-mount-home", "--no-container-remap-root", "--no-container-entrypoint"),
            ),
            srun_variables={**self._vendor.container.enroot, **(_ADAPTERS if fabric else {})},
        )

    def _container_mounts(self, command: Command) -> Iterator[str]:
        for bind in self._mounts(command):
            if set(",: ") & set(bind.host + bind.inside):
                raise InputError(
                    "no mount of Pyxis can name this folder",
                    place="--engine pyxis",
                    found=bind.host,
                    allowed="a path without comma, colon and space",
                )
            yield f"{bind.host}:{bind.inside}:{bind.mode}"
