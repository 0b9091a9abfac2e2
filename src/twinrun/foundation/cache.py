"""Where the project lies, where runs go, and where things that can be made again are kept between them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from twinrun.foundation.errors import MachineError

# Recipes, stacks and sources of an installed wheel.
SHIPPED = Path(__file__).parents[1] / "checkout"
COMPLETE = "sealed"
"""File that is written last into an environment, with what each of its entries must be."""


def cache_root() -> Path:
    """Return $TWINRUN_CACHE, else $XDG_CACHE_HOME/twinrun, else ~/.cache/twinrun.

    Raises:
        MachineError: the user has no home folder.
    """
    own, shared = os.environ.get("TWINRUN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own or f"{shared or '~/.cache'}/twinrun").expanduser().absolute()
    except RuntimeError:
        raise MachineError("this user has no home folder", place="HOME", hint="set TWINRUN_CACHE") from None


def project_root() -> Path:
    """Return the checkout that this process works in, else the one that this package is part of or ships."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "images" / "gpus.toml").is_file() and (folder / "recipes").is_dir():
            return folder
    return SHIPPED if SHIPPED.is_dir() else SHIPPED.parents[2]


def runs_folder(root: Path) -> Path:
    """Return where runs go: `runs` of a checkout.

    What a wheel ships is no place to write: there it is `runs` of the working folder, or
    $XDG_STATE_HOME/twinrun/runs where the working folder is closed.
    """
    if root != SHIPPED:
        return root / "runs"
    own = Path("runs").absolute()
    if os.access(own if own.is_dir() else own.parent, os.W_OK | os.X_OK):
        return own
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "twinrun" / "runs"


def environment_folder(stack: str, lock_sha256: str) -> Path:
    """Return the virtual environment that belongs to one lock of `stack`."""
    return cache_root() / "environments" / f"{stack}-{lock_sha256[:12]}"


def bytecode_folder() -> Path:
    """Return where interpreters of this machine keep what they have compiled of Python."""
    return cache_root() / "bytecode"


def prune_bytecode() -> None:
    """Remove what was compiled of folders that are gone: each checkout and temporary folder leaves some."""
    _prune(bytecode_folder(), Path("/"))


def _prune(compiled: Path, source: Path) -> None:
    for folder in [one for one in compiled.glob("*") if one.is_dir()]:
        if not (source / folder.name).is_dir():
            shutil.rmtree(folder, ignore_errors=True)
        elif not any(folder.glob("*.pyc")):
            # Below a folder of modules lie parts of the same package or environment.
            _prune(folder, source / folder.name)
