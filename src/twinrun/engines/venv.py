"""The stack's lock in a virtual environment, made once for each lock and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from uv import find_uv_bin

from twinrun.cache import environment_folder
from twinrun.engine import Engine, Site
from twinrun.errors import MachineError
from twinrun.hardware import Vendor
from twinrun.interpreter import Interpreter
from twinrun.process import last_lines
from twinrun.stack import LoadedStack

_COMPLETE = "complete"

RUNS_IMAGES = False


def unusable(*, stack: LoadedStack, vendor: Vendor) -> str | None:
    """Return None: what stands against a lock is known only when it is read, see `open_engine`."""
    return None


def open_engine(*, stack: LoadedStack, vendor: Vendor, site: Site, say: Callable[[str], None]) -> Engine:
    """Return the environment of the stack's lock, installing it if this machine has not yet.

    Raises:
        MachineError: a pin has no hash, or the packages cannot be had.
    """
    unhashed = stack.unhashed(site.root)
    if unhashed:
        raise MachineError(
            "the lock has no hash for some pins",
            place=f"{stack.folder}/requirements.lock",
            found=unhashed,
            hint=f"run `invoke lock --stack {stack.stack.name} --index URL` with an index that carries them,"
            " or use --engine host where they are installed",
        )
    folder = environment_folder(stack.stack.name, stack.requirements_sha256(site.root))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / _COMPLETE).is_file():
            _install(stack, folder, site.root, say)
    return Interpreter(python=str(folder / "bin" / "python"), site=site)


def _install(stack: LoadedStack, folder: Path, root: Path, say: Callable[[str], None]) -> None:
    """Make the environment; the marker is written last, so a half-made one is made again."""
    say(f"installing {stack.stack.name} from its lock, once: {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    lock = str(stack.lock(root))
    try:
        _uv("venv", "--quiet", "--python", stack.stack.python, str(folder))
        _uv("pip", "sync", "--require-hashes", "--python", str(folder / "bin" / "python"), lock)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / _COMPLETE).touch()


def _uv(*arguments: str) -> None:
    """Run uv; what it says is kept for the error."""
    try:
        done = subprocess.run(
            [os.fspath(find_uv_bin()), *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    except OSError as error:
        raise MachineError(
            f"cannot start uv: {error.strerror}", hint="install twinrun with pip; it brings uv"
        ) from None
    if done.returncode:
        raise MachineError(
            "the environment cannot be installed",
            place=f"uv {arguments[0]} {arguments[1]}",
            found=last_lines(done.stderr, 6),
            hint="check the network, or carry the cache folder over from a machine that has the environment",
        )
