"""The stack's image as one file: Apptainer or SingularityCE runs it as its caller, and Pyxis under srun."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

from twinrun.execution.engine import PYTHON, Command, Engine, NodeCommand, Say, Workspace
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor

_TEMPORARY_FOLDER = "/tmp"  # noqa: S108
# On which Enroot's hook for Mellanox passes the adapters on.
_ADAPTERS = {"MELLANOX_VISIBLE_DEVICES": "all"}


class ImageFile(Engine):
    """An image file, and the folders that its processes see, each under its own path."""

    RUNS_IMAGES = True
    program: ClassVar[str]
    form: ClassVar[str] = "sif"
    """Format of the file, and the folder of the cache that it lies in."""

    def __init__(self, *, file: Path, vendor: Vendor, workspace: Workspace) -> None:
        self._file, self._vendor, self._workspace = file, vendor, workspace

    @classmethod
    def file(cls, stack: LoadedStack) -> Path:
        """Return the file of the image that is made of the stack's inputs."""
        return cache_root() / cls.form / f"{stack.stack.name}-{stack.inputs_sha256[:12]}.{cls.form}"

    @classmethod
    def unusable(cls, *, stack: LoadedStack, vendor: Vendor) -> str | None:
        """Return why the stack's file cannot be run here, or None."""
        if shutil.which(cls.program) is None:
            return f"{cls.program} is not installed"
        return None if cls.file(stack).is_file() else f"no file {cls.file(stack)}"

    @classmethod
    def renderer(cls, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> Self:
        """Return what writes the commands, whether the file is there or not."""
        return cls(file=cls.file(stack), vendor=vendor, workspace=workspace)

    @classmethod
    def open_engine(cls, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Say) -> Self:
        """Return the engine for the file of the stack's image; raises MachineError where it cannot be run."""
        if reason := cls.unusable(stack=stack, vendor=vendor):
            hint = cls._made(stack, cls.file(stack))
            raise MachineError(reason, place=f"--engine {cls.program}", hint=hint)
        found = cls.renderer(stack=stack, vendor=vendor, workspace=workspace)
        found.image_digest = f"sha256:{sha256_of_file(cls.file(stack))}"
        return found

    @classmethod
    def _made(cls, stack: LoadedStack, file: Path) -> str:
        """Return in words how the file is made."""
        save = f"`invoke build --stack {stack.stack.name} --save image.tar` where there is an engine"
        return f"{save}, then here `{cls.program} build {file} oci-archive:image.tar`"

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


class Apptainer(ImageFile):
    """Writes each command as an `exec` in the file, which may write to the run folder, /tmp and /dev/shm."""

    program = "apptainer"

    def render(self, command: Command) -> NodeCommand:
        """Return the `exec` of `command`."""
        return NodeCommand(
            arguments=(*self._start(command), str(self._file), "python3", *command.arguments[1:]),
            # With --no-eval any text is a value there, while the option that sets variables splits at commas.
            variables={
                f"{self.program.upper()}ENV_{name}": value for name, value in self._variables(command).items()
            },
            folder=self._workspace.root,
        )

    def _start(self, command: Command) -> Iterator[str]:
        # Else the container's shell replaces variables in the values of variables, and runs what is in $( ).
        yield from (self.program, "exec", "--no-eval")
        # That of the node; the user's own may not be there, and what is installed in it is not the stack's.
        # As the home it is mounted by itself; as `tmp` it would bring /var/tmp along.
        yield from ("--home", _TEMPORARY_FOLDER, "--no-mount", "cwd,tmp", *self._vendor.container.apptainer)
        for bind in self._workspace.binds(str, data=command.writes_data):
            # In quotes, for --mount takes comma-separated values.
            source, target = (one.replace('"', '""') for one in (bind.host, bind.inside))
            only = ",ro" if bind.mode == "ro" else ""
            yield from ("--mount", f'type=bind,"src={source}","dst={target}"{only}')
        yield from ("--pwd", str(self._workspace.root))


class Singularity(Apptainer):
    """SingularityCE, which some sites have in place of Apptainer; no machine of ours has run it."""

    program = "singularity"


class Pyxis(ImageFile):
    """Writes commands as they are inside the image, with the options of srun that lead there."""

    program, form = "pyxis", "sqsh"

    @classmethod
    def unusable(cls, *, stack: LoadedStack, vendor: Vendor) -> str:
        """Return that nothing is started here."""
        return "commands for Pyxis are only written"

    @classmethod
    def _made(cls, stack: LoadedStack, file: Path) -> str:
        imported = f"`enroot import --output {file} dockerd://{stack.image()}`"
        return f"--dry prints the sbatch script of each point; {imported} makes the file"

    def render(self, command: Command) -> NodeCommand:
        """Return `command` with what srun is told; raises InputError for a folder that it cannot name."""
        binds = self._workspace.binds(str, data=command.writes_data)
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
