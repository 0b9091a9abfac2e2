"""The stack's image as one file under Apptainer, for clusters without a daemon, as the user who starts it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from twinrun.execution.engine import Command, Engine, NodeCommand, Workspace
from twinrun.execution.local_engines import TEMPORARY_FOLDER, ImageFile, LocalCommands, image_file
from twinrun.foundation.errors import MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor

PROGRAM = "apptainer"
FORM = "sif"
RUNS_IMAGES = True


def unusable(*, stack: LoadedStack, vendor: Vendor) -> str | None:
    """Return why the stack's file cannot be run here, or None."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not installed"
    return None if image_file(stack, form=FORM).is_file() else f"no file {image_file(stack, form=FORM)}"


def renderer(*, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> ApptainerRenderer:
    """Return what writes the commands, whether the file is there or not."""
    return ApptainerRenderer(file=image_file(stack, form=FORM), vendor=vendor, workspace=workspace)


def open_engine(
    *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Callable[[str], None]
) -> Engine:
    """Return the engine for the file of the stack's image; raises MachineError where it cannot be run."""
    reason, file = unusable(stack=stack, vendor=vendor), image_file(stack, form=FORM)
    if reason:
        save = f"`invoke build --stack {stack.stack.name} --save image.tar` where there is an engine"
        raise MachineError(
            reason,
            place="--engine apptainer",
            hint=f"{save}, then here `{PROGRAM} build {file} oci-archive:image.tar`",
        )
    return ApptainerEngine(file=file, vendor=vendor, workspace=workspace)


class ApptainerRenderer(ImageFile):
    """Writes each command as an `apptainer exec`, which may write to the run folder, /tmp and /dev/shm."""

    def render(self, command: Command) -> NodeCommand:
        """Return the `apptainer exec` of `command`."""
        variables = self._variables(command)
        return NodeCommand(
            arguments=(*self._start(command), str(self._file), "python3", *command.arguments[1:]),
            # With --no-eval any text is a value there, while the option that sets variables splits at commas.
            variables={f"APPTAINERENV_{name}": value for name, value in variables.items()},
            folder=self._workspace.root,
        )

    def _start(self, command: Command) -> Iterator[str]:
        # Else the container's shell replaces variables in the values of variables, and runs what is in $( ).
        yield from (PROGRAM, "exec", "--no-eval")
        # That of the node; the user's own may not be there, and what is installed in it is not the stack's.
        # As the home it is mounted by itself; as `tmp` it would bring /var/tmp along.
        yield from ("--home", TEMPORARY_FOLDER, "--no-mount", "cwd,tmp", *self._vendor.container.apptainer)
        for folder, mode in self._mounts(command):
            # In quotes, for --bind splits paths at colons and commas.
            ends = (_quoted(f"{end}={folder}") for end in ("src", "dst"))
            yield from ("--mount", ",".join(("type=bind", *ends, *(["ro"] if mode == "ro" else []))))
        yield from ("--pwd", str(self._workspace.root))


def _quoted(field: str) -> str:
    """Return a field of comma-separated values."""
    return '"' + field.replace('"', '""') + '"'


class ApptainerEngine(ApptainerRenderer, LocalCommands):
    """Each command is a process of this machine's user."""

    def __init__(self, *, file: Path, vendor: Vendor, workspace: Workspace) -> None:
        super().__init__(file=file, vendor=vendor, workspace=workspace)
        self.image_digest: str | None = f"sha256:{sha256_of_file(file)}"
