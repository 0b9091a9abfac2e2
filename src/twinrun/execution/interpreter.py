"""Engines without an image: the stack's lock in an environment of its own, and the interpreter as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from uv import find_uv_bin

from twinrun.execution.engine import PYTHON, Command, Engine, NodeCommand, Say, Workspace
from twinrun.foundation.cache import COMPLETE, bytecode_folder, environment_folder, locked
from twinrun.foundation.errors import MachineError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.text import plural, size
from twinrun.manifests.stack import LoadedStack, framework_index
from twinrun.manifests.vendor import Vendor


class Interpreter(Engine):
    """The interpreter as it is; its differences from the lock are recorded."""

    def __init__(self, *, python: str, workspace: Workspace, search_path: str = "") -> None:
        """Take the interpreter at `python`; `search_path` goes behind the project in PYTHONPATH."""
        self._python, self._workspace, self._search_path = python, workspace, search_path

    @classmethod
    def renderer(cls, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> Interpreter:
        """Return the running interpreter."""
        search_path = os.environ.get("PYTHONPATH", "")
        return Interpreter(python=sys.executable, workspace=workspace, search_path=search_path)

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

    def __init__(self, *, folder: Path, workspace: Workspace) -> None:
        super().__init__(python=str(folder / "bin" / "python"), workspace=workspace)
        self._folder = folder

    @classmethod
    def renderer(cls, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> Environment:
        """Return the interpreter of the environment, which may not be installed yet."""
        folder = environment_folder(stack.stack.name, stack.requirements_sha256(workspace.root))
        return Environment(folder=folder, workspace=workspace)

    @classmethod
    def open_engine(
        cls, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Say
    ) -> Environment:
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
        found = {}
        for folder, names, files in os.walk(self._folder):
            # Of compiled Python ranks keep and read their own, in another folder.
            names[:] = [name for name in names if name != "__pycache__"]
            for path in (Path(folder, name) for name in files):
                if path.lstat().st_mtime_ns > sealed:
                    found[str(path.relative_to(self._folder))] = "written after the installation"
        return dict(sorted(found.items()))


def _install(stack: LoadedStack, folder: Path, root: Path, say: Say) -> None:
    """Make the environment; the marker is written last, so a half-made one is made again."""
    sizes = stack.stack.environment
    count = plural(len(stack.locked(root)), "package")
    download = f", {size(sizes.download)} to download" if sizes and sizes.download else ""
    amount = f"{download}, about {size(sizes.disk)} on the disk" if sizes else ""
    say(f"installing {stack.stack.name} from its lock, once: {count}{amount}: {folder}")
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
    status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode
    if status:
        hint = "a hash mismatch is another file than the locked one, and was not installed; else see to the"
        hint += " network, or to the room in TWINRUN_CACHE and UV_CACHE_DIR"
        place, found = f"uv {arguments[0]} {arguments[1]}", f"exit status {status}; what uv printed is above"
        raise MachineError("the environment cannot be installed", place=place, found=found, hint=hint)
