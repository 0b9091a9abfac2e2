"""The stack's image as one file under Apptainer, for clusters without a daemon, as the user who starts it.

Its commands are rendered and held by golden files; no machine of ours has run it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Engine, NodeCommand, Workspace
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.processes import LocalProcess, read_output
from twinrun.machine.inventory import Vendor
from twinrun.manifests.stack import LoadedStack

PROGRAM = "apptainer"
_TEMPORARY_FOLDER = "/tmp"  # noqa: S108
RUNS_IMAGES = True


def unusable(*, stack: LoadedStack, vendor: Vendor) -> str | None:
    """Return why the stack's file cannot be run here, or None."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not installed"
    return None if image_file(stack).is_file() else f"no file {image_file(stack)}"


def image_file(stack: LoadedStack) -> Path:
    """Return the file of the image that is made of the stack's inputs."""
    return cache_root() / "sif" / f"{stack.stack.name}-{stack.inputs_sha256[:12]}.sif"


def renderer(*, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> ApptainerRenderer:
    """Return what writes the commands, whether the file is there or not."""
    return ApptainerRenderer(file=image_file(stack), vendor=vendor, workspace=workspace)


def open_engine(
    *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Callable[[str], None]
) -> Engine:
    """Return the engine for the file of the stack's image; raises MachineError where it cannot be run."""
    reason, file = unusable(stack=stack, vendor=vendor), image_file(stack)
    if reason:
        save = f"`invoke build --stack {stack.stack.name} --save image.tar` where there is an engine"
        raise MachineError(
            reason,
            place="--engine apptainer",
            hint=f"{save}, then here `{PROGRAM} build {file} oci-archive:image.tar`",
        )
    return ApptainerEngine(file=file, vendor=vendor, workspace=workspace)


class ApptainerRenderer:
    """Writes each command as an `apptainer exec`; nothing in it is writable but the run folder and /tmp."""

    def __init__(self, *, file: Path, vendor: Vendor, workspace: Workspace) -> None:
        """Take an image file and the folders that its processes see, each under its own path."""
        self._file = file
        self._vendor = vendor
        self._workspace = workspace

    def inside(self, path: Path) -> str:
        """Return `path` itself."""
        return str(path)

    def render(self, command: Command) -> NodeCommand:
        """Return the `apptainer exec` of `command`."""
        assert command.arguments[0] == PYTHON
        own = (self._workspace.root / "src", *self._workspace.packages)
        variables = {
            "PYTHONDONTWRITEBYTECODE": "1",
            # Without them the interpreter would find packages of the user and of the node.
            "PYTHONNOUSERSITE": "1",
            "PYTHONPATH": ":".join(map(str, own)),
            **command.variables,
        }
        return NodeCommand(
            arguments=(*self._start(command), str(self._file), "python3", *command.arguments[1:]),
            # Any text is a value there, while the option that sets variables splits at commas.
            variables={f"APPTAINERENV_{name}": value for name, value in variables.items()},
            folder=self._workspace.root,
        )

    def _start(self, command: Command) -> Iterator[str]:
        yield from (PROGRAM, "exec")
        # That of the node; the user's own may not be there, and what is installed in it is not the stack's.
        yield from ("--home", _TEMPORARY_FOLDER, "--no-mount", "cwd", *self._vendor.container.apptainer)
        workspace = self._workspace
        data = "rw" if command.writes_data else "ro"
        for folder, mode in ((workspace.root, "ro"), (workspace.data, data), (workspace.run, "rw")):
            yield from ("--bind", f"{folder}:{folder}:{mode}")
        yield from ("--pwd", str(workspace.root))


class ApptainerEngine(ApptainerRenderer):
    """Each command is a process of this machine's user."""

    def __init__(self, *, file: Path, vendor: Vendor, workspace: Workspace) -> None:
        super().__init__(file=file, vendor=vendor, workspace=workspace)
        self.image_digest: str | None = f"sha256:{sha256_of_file(file)}"

    def start(self, command: NodeCommand, *, log: Path) -> LocalProcess:
        """Start `command` with its output in `log`."""
        return LocalProcess(command.arguments, variables=command.variables, folder=command.folder, log=log)

    def read(self, command: Command) -> str:
        """Run a short `command` and return its standard output; raises RunError."""
        rendered = self.render(command)
        return read_output(rendered.arguments, variables=rendered.variables, folder=rendered.folder)
