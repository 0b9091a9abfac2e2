"""The stack's image as one SIF file, which Apptainer or SingularityCE runs as the user who starts it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from twinrun.execution.engine import Command, Engine, NodeCommand, Workspace
from twinrun.execution.local_engines import TEMPORARY_FOLDER, ImageFile, LocalCommands, image_file
from twinrun.foundation.errors import MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor

FORM = "sif"


class Program(NamedTuple):
    """A program that runs such files; the options are the same."""

    name: str
    prefix: str
    """Begins the names of variables that it sets inside."""


def unusable(program: Program, stack: LoadedStack) -> str | None:
    """Return why the stack's file cannot be run here, or None."""
    if shutil.which(program.name) is None:
        return f"{program.name} is not installed"
    file = image_file(stack, form=FORM)
    return None if file.is_file() else f"no file {file}"


def renderer(program: Program, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> SifRenderer:
    """Return what writes the commands, whether the file is there or not."""
    return SifRenderer(program=program, file=image_file(stack, form=FORM), vendor=vendor, workspace=workspace)


def open_engine(program: Program, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> Engine:
    """Return the engine for the file of the stack's image; raises MachineError where it cannot be run."""
    reason, file = unusable(program, stack), image_file(stack, form=FORM)
    if reason:
        save = f"`invoke build --stack {stack.stack.name} --save image.tar` where there is an engine"
        raise MachineError(
            reason,
            place=f"--engine {program.name}",
            hint=f"{save}, then here `{program.name} build {file} oci-archive:image.tar`",
        )
    return SifEngine(program=program, file=file, vendor=vendor, workspace=workspace)


class SifRenderer(ImageFile):
    """Writes each command as an `exec` in the file, which may write to the run folder, /tmp and /dev/shm."""

    def __init__(self, *, program: Program, file: Path, vendor: Vendor, workspace: Workspace) -> None:
        super().__init__(file=file, vendor=vendor, workspace=workspace)
        self._program = program

    def render(self, command: Command) -> NodeCommand:
        """Return the `exec` of `command`."""
        variables = self._variables(command)
        return NodeCommand(
            arguments=(*self._start(command), str(self._file), "python3", *command.arguments[1:]),
            # With --no-eval any text is a value there, while the option that sets variables splits at commas.
            variables={f"{self._program.prefix}{name}": value for name, value in variables.items()},
            folder=self._workspace.root,
        )

    def _start(self, command: Command) -> Iterator[str]:
        # Else the container's shell replaces variables in the values of variables, and runs what is in $( ).
        yield from (self._program.name, "exec", "--no-eval")
        # That of the node; the user's own may not be there, and what is installed in it is not the stack's.
        # As the home it is mounted by itself; as `tmp` it would bring /var/tmp along.
        yield from ("--home", TEMPORARY_FOLDER, "--no-mount", "cwd,tmp", *self._vendor.container.apptainer)
        for bind in self._mounts(command):
            # In quotes, for --bind splits paths at colons and commas.
            ends = (_quoted(f"src={bind.host}"), _quoted(f"dst={bind.inside}"))
            yield from ("--mount", ",".join(("type=bind", *ends, *(["ro"] if bind.mode == "ro" else []))))
        yield from ("--pwd", str(self._workspace.root))


def _quoted(field: str) -> str:
    """Return a field of comma-separated values."""
    return '"' + field.replace('"', '""') + '"'


class SifEngine(SifRenderer, LocalCommands):
    """Each command is a process of this machine's user."""

    def __init__(self, *, program: Program, file: Path, vendor: Vendor, workspace: Workspace) -> None:
        super().__init__(program=program, file=file, vendor=vendor, workspace=workspace)
        self.image_digest: str | None = f"sha256:{sha256_of_file(file)}"
