"""The stack's image as one file: Apptainer or SingularityCE runs it as its caller, and Pyxis under srun."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Engine, NodeCommand, Say, Workspace
from twinrun.execution.interpreter import LocalCommands
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.manifests.cluster import Bind
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor

_TEMPORARY_FOLDER = "/tmp"  # noqa: S108
# On which Enroot's hook for Mellanox passes the adapters on.
_ADAPTERS = {"MELLANOX_VISIBLE_DEVICES": "all"}


class ImageFile(LocalCommands):
    """An image file, and the folders that its processes see, each under its own path."""

    def __init__(self, *, file: Path, vendor: Vendor, workspace: Workspace) -> None:
        self._file, self._vendor, self._workspace = file, vendor, workspace

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
        folders = (workspace.root, workspace.data, workspace.run, workspace.recipe, workspace.source)
        writable = workspace.writable(data=command.writes_data)
        for folder in filter(None, (*folders, workspace.place)):
            yield Bind(host=str(folder), inside=str(folder), mode="rw" if folder in writable else "ro")
        if workspace.nodes:
            yield from workspace.nodes.bound


class SifRenderer(ImageFile):
    """Writes each command as an `exec` in the file, which may write to the run folder, /tmp and /dev/shm."""

    def __init__(
        self, *, program: str, file: Path, vendor: Vendor, workspace: Workspace, whole: bool = False
    ) -> None:
        super().__init__(file=file, vendor=vendor, workspace=workspace)
        self._program = program
        self.image_digest = f"sha256:{sha256_of_file(file)}" if whole else None

    def render(self, command: Command) -> NodeCommand:
        """Return the `exec` of `command`."""
        return NodeCommand(
            arguments=(*self._start(command), str(self._file), "python3", *command.arguments[1:]),
            # With --no-eval any text is a value there, while the option that sets variables splits at commas.
            variables={
                f"{self._program.upper()}ENV_{name}": value
                for name, value in self._variables(command).items()
            },
            folder=self._workspace.root,
        )

    def _start(self, command: Command) -> Iterator[str]:
        # Else the container's shell replaces variables in the values of variables, and runs what is in $( ).
        yield from (self._program, "exec", "--no-eval")
        # That of the node; the user's own may not be there, and what is installed in it is not the stack's.
        # As the home it is mounted by itself; as `tmp` it would bring /var/tmp along.
        yield from ("--home", _TEMPORARY_FOLDER, "--no-mount", "cwd,tmp", *self._vendor.container.apptainer)
        for bind in self._mounts(command):
            # In quotes, for --mount takes comma-separated values.
            ends = (
                '"' + f"{end}={path}".replace('"', '""') + '"'
                for end, path in (("src", bind.host), ("dst", bind.inside))
            )
            yield from ("--mount", ",".join(("type=bind", *ends, *(["ro"] if bind.mode == "ro" else []))))
        yield from ("--pwd", str(self._workspace.root))


class PyxisRenderer(ImageFile):
    """Writes commands as they are inside the image, with the options of srun that lead there."""

    def render(self, command: Command) -> NodeCommand:
        """Return `command` with what srun is told; raises InputError for a folder that it cannot name."""
        binds = list(self._mounts(command))
        for bind in binds:
            if set(",: ") & set(bind.host + bind.inside):
                message = "no mount of Pyxis can name this folder"
                allowed = "a path without comma, colon and space"
                raise InputError(message, place="--engine pyxis", found=bind.host, allowed=allowed)
        mounts = ",".join(f"{bind.host}:{bind.inside}:{bind.mode}" for bind in binds)
        fabric = self._workspace.nodes is not None and self._workspace.nodes.infiniband
        return NodeCommand(
            arguments=("python3", *command.arguments[1:]),
            # The user's own home is not there, and compilers write below it.
            variables=self._variables(command, HOME=_TEMPORARY_FOLDER),
            folder=self._workspace.root,
            srun_options=(
                *(f"--container-image={self._file}", f"--container-mounts={mounts}", "--container-readonly"),
                *("--no-container-mount-home", "--no-container-remap-root", "--no-container-entrypoint"),
            ),
            srun_variables={**self._vendor.container.enroot, **(_ADAPTERS if fabric else {})},
        )


@dataclass(frozen=True)
class ImageFileKind:
    """The engine that `program` is; none for Pyxis, whose commands are only written here."""

    program: str
    form: str
    """Format of the file, and the folder of the cache that it lies in."""
    RUNS_IMAGES = True
    ADDS_GROUPS = False

    def file(self, stack: LoadedStack) -> Path:
        """Return the file of the image that is made of the stack's inputs."""
        return cache_root() / self.form / f"{stack.stack.name}-{stack.inputs_sha256[:12]}.{self.form}"

    def unusable(self, *, stack: LoadedStack, vendor: Vendor) -> str | None:
        """Return why the stack's file cannot be run here, or None."""
        if self.program == "pyxis":
            return "commands for Pyxis are only written"
        if shutil.which(self.program) is None:
            return f"{self.program} is not installed"
        return None if self.file(stack).is_file() else f"no file {self.file(stack)}"

    def renderer(
        self, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, whole: bool = False
    ) -> SifRenderer | PyxisRenderer:
        """Return what writes the commands, whether the file is there or not."""
        file = self.file(stack)
        if self.program == "pyxis":
            return PyxisRenderer(file=file, vendor=vendor, workspace=workspace)
        return SifRenderer(program=self.program, file=file, vendor=vendor, workspace=workspace, whole=whole)

    def open_engine(self, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Say) -> Engine:
        """Return the engine for the file of the stack's image; raises MachineError where it cannot be run."""
        if reason := self.unusable(stack=stack, vendor=vendor):
            file = self.file(stack)
            save = f"`invoke build --stack {stack.stack.name} --save image.tar` where there is an engine"
            made = f"{save}, then here `{self.program} build {file} oci-archive:image.tar`"
            if self.program == "pyxis":
                imported = f"`enroot import --output {file} dockerd://{stack.image()}`"
                made = f"--dry prints the sbatch script of each point; {imported} makes the file"
            raise MachineError(reason, place=f"--engine {self.program}", hint=made)
        return self.renderer(stack=stack, vendor=vendor, workspace=workspace, whole=True)
