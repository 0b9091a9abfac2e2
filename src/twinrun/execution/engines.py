"""Engines, a row each: how a stack becomes processes; here those whose command ends with its process.

The stack's lock in an environment of its own, the interpreter as it is, and the stack's image as one file:
Apptainer or SingularityCE runs it as its caller, and Pyxis under srun.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

from uv import find_uv_bin

from twinrun.execution.containers import ContainerEngine, Docker, Podman
from twinrun.execution.engine import PYTHON, Command, Engine, NodeCommand, Say, Workspace
from twinrun.foundation.cache import COMPLETE, bytecode_folder, cache_root, environment_folder, locked
from twinrun.foundation.errors import InputError, MachineError, require_known
from twinrun.foundation.files import sha256_of_file, write_atomically
from twinrun.foundation.text import plural
from twinrun.manifests.stack import LoadedStack, framework_index
from twinrun.manifests.vendor import Vendor

_TEMPORARY_FOLDER = "/tmp"  # noqa: S108
# On which Enroot's hook for Mellanox passes the adapters on.
_ADAPTERS = {"MELLANOX_VISIBLE_DEVICES": "all"}


class Interpreter(Engine):
    """The interpreter as it is; its differences from the lock are recorded."""

    def __init__(self, *, python: str, workspace: Workspace, search_path: str = "") -> None:
        """Take the interpreter at `python`; `search_path` goes behind the project in PYTHONPATH."""
        self._python, self._workspace, self._search_path = python, workspace, search_path

    @classmethod
    def renderer(cls, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> Self:
        """Return the running interpreter."""
        search_path = os.environ.get("PYTHONPATH", "")
        return cls(python=sys.executable, workspace=workspace, search_path=search_path)

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
        words = (self._python, *command.arguments[1:])
        return NodeCommand(arguments=words, variables=variables, folder=self._workspace.root)


class Environment(Interpreter):
    """The stack's lock in a virtual environment, made once for each lock and kept."""

    @property
    def _folder(self) -> Path:
        return Path(self._python).parents[1]

    @classmethod
    def renderer(cls, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> Self:
        """Return the interpreter of the environment, which may not be installed yet."""
        folder = environment_folder(stack.stack.name, stack.requirements_sha256(workspace.root))
        return cls(python=str(folder / "bin" / "python"), workspace=workspace)

    @classmethod
    def open_engine(cls, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Say) -> Self:
        """Return the environment of the stack's lock, installing it if this machine has not yet.

        Raises:
            MachineError: the packages cannot be had.
        """
        found = cls.renderer(stack=stack, vendor=vendor, workspace=workspace)
        found._folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(Path(f"{found._folder}.lock")):
            if not (found._folder / COMPLETE).is_file():
                _install(stack, found._folder, workspace.root, say)
        return found

    def changed_files(self) -> dict[str, str]:
        """Return each file that was written after the installation; who sets its time back hides it."""
        sealed = (self._folder / COMPLETE).stat().st_mtime_ns
        files = (Path(folder, name) for folder, _, names in os.walk(self._folder) for name in names)
        # Of compiled Python ranks keep and read their own, in another folder.
        own = (file for file in files if "__pycache__" not in file.parts)
        late = [file for file in own if file.lstat().st_mtime_ns > sealed]
        return {str(one.relative_to(self._folder)): "written after the installation" for one in sorted(late)}


def _install(stack: LoadedStack, folder: Path, root: Path, say: Say) -> None:
    """Make the environment; the marker is written last, so a half-made one is made again."""
    count = plural(len(stack.locked(root)), "package")
    say(f"installing {stack.stack.name} from its lock, once: {count}: {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    index = framework_index(stack.stack)
    # That index has old releases of other packages too, which must not hide those of the general one.
    options = ("--index", index, "--index-strategy", "unsafe-best-match") if index else ()
    try:
        _run_uv("venv", "--quiet", "--python", stack.stack.python, str(folder))
        _run_uv(
            # Hard links: who follows a symbolic one sees no change of what it leads to.
            *("pip", "sync", "--require-hashes", "--link-mode", "hardlink", *options),
            *("--python", str(folder / "bin" / "python"), str(stack.lock(root))),
        )
        write_atomically(folder / COMPLETE, "")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run_uv(*arguments: str) -> None:
    """Run uv, which says itself how far it is; raises MachineError where it fails."""
    # Standard output is for data, and uv's words are not.
    command = [os.fspath(find_uv_bin()), *arguments]
    if status := subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode:
        hint = "a hash mismatch is another file than the locked one, and was not installed; else see to the"
        hint += " network, or to the room in TWINRUN_CACHE and UV_CACHE_DIR"
        place, found = f"uv {arguments[0]} {arguments[1]}", f"exit status {status}; what uv printed is above"
        raise MachineError("the environment cannot be installed", place=place, found=found, hint=hint)


class ImageFile(Engine):
    """An image file, and the folders that its processes see, each under its own path."""

    RUNS_IMAGES = True
    program: ClassVar[str]
    form: ClassVar[str] = "sif"
    """Format of the file, and the folder of the cache that it lies in."""
    made: ClassVar[str] = (
        "`invoke build --stack {stack} --save image.tar` where there is an engine, then here"
        " `{program} build {file} oci-archive:image.tar`"
    )
    """Words that say how the file is made."""

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
        file, told = cls.file(stack), {"stack": stack.stack.name, "image": stack.image()}
        if reason := cls.unusable(stack=stack, vendor=vendor):
            hint = cls.made.format(program=cls.program, file=file, **told)
            raise MachineError(reason, place=f"--engine {cls.program}", hint=hint)
        found = cls.renderer(stack=stack, vendor=vendor, workspace=workspace)
        found.image_digest = f"sha256:{sha256_of_file(file)}"
        return found

    def _variables(self, command: Command, **more: str) -> dict[str, str]:
        """Return the environment of `command`, its own variables last."""
        assert command.arguments[0] == PYTHON
        # Without them the interpreter would find packages of the user and of the node.
        fixed = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1", **more}
        return {**fixed, "PYTHONPATH": ":".join(map(str, self._workspace.search_path)), **command.variables}


class Apptainer(ImageFile):
    """Writes each command as an `exec` in the file, which may write to the run folder, /tmp and /dev/shm."""

    program = "apptainer"

    def render(self, command: Command) -> NodeCommand:
        """Return the `exec` of `command`."""
        # With --no-eval any text is a value there, while the option that sets variables splits at commas.
        told, prefix = self._variables(command), f"{self.program.upper()}ENV_"
        return NodeCommand(
            arguments=(*self._start(command), str(self._file), "python3", *command.arguments[1:]),
            variables={f"{prefix}{name}": value for name, value in told.items()},
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
    made = (
        "--dry prints the sbatch script of each point; `enroot import --output {file} dockerd://{image}`"
        " makes the file"
    )

    @classmethod
    def unusable(cls, *, stack: LoadedStack, vendor: Vendor) -> str:
        """Return that nothing is started here."""
        return "commands for Pyxis are only written"

    def render(self, command: Command) -> NodeCommand:
        """Return `command` with what srun is told; raises InputError for a folder that it cannot name."""
        binds = self._workspace.binds(str, data=command.writes_data)
        if bad := next((one.host for one in binds if set(",: ") & set(one.host + one.inside)), None):
            message, allowed = "no mount of Pyxis can name this folder", "a path without comma, colon, space"
            raise InputError(message, place="--engine pyxis", found=bad, allowed=allowed)
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


_OF_IMAGES: tuple[type[ContainerEngine | ImageFile], ...] = (Apptainer, Docker, Podman, Pyxis, Singularity)
ENGINES: dict[str, type[Engine]] = {"host": Interpreter, "venv": Environment}
ENGINES |= {one.program: one for one in _OF_IMAGES}


def load_engine(name: str) -> type[Engine]:
    """Return the engine called `name`; raises InputError when there is none."""
    require_known(name, sorted(ENGINES), "unknown engine", place="--engine")
    return ENGINES[name]
