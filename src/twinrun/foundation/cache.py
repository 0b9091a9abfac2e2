"""Where the project lies and what git tracks of it, where runs go, what is kept between them, and locks."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from twinrun.foundation.errors import InputError, MachineError, RunError, TwinrunError
from twinrun.foundation.files import canonical_json, real, sha256_of_bytes, sha256_of_file
from twinrun.foundation.processes import read_output

# Recipes, stacks and sources of an installed wheel.
SHIPPED = Path(__file__).parents[1] / "checkout"
_GIT_VARIABLES = {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
# NFS without its lock daemon, Lustre without `flock` and several user-space file systems answer so.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_HINT = "choose another by TWINRUN_CACHE, --out or --checkpoint place=, or mount this one with locks"
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


def tracked_files(root: Path, folder: str) -> list[Path]:
    """Return the regular files below `folder` that git tracks, sorted: what else lies there never leaves.

    Raises:
        InputError: `root` is no repository, git tracks nothing there, or what it tracks is a link or leads
            through one.
    """
    command = ["git", "ls-files", "-z", "--cached", "--", f":(literal){folder}"]
    try:
        listed = read_output(command, variables=_GIT_VARIABLES, folder=root, seconds=20)
    except RunError as error:
        message, hint = "git does not say which files belong to it", "work in a clone of the repository"
        found = error.found or error.message
        raise InputError(message, place=str(root / folder), found=found, hint=hint) from None
    if not (names := sorted(set(listed.split("\0")) - {""})):
        raise InputError("git tracks no file there", place=str(root / folder), hint="`git add` what belongs")
    files = [root / name for name in names if os.path.lexists(root / name)]
    for file in files:
        if (found := real(file)) != real(root) / file.relative_to(root):
            raise InputError("a link cannot go into an image", place=str(file), found=str(found))
        if not file.is_file():
            raise InputError("not a regular file", place=str(file))
    return files


def tree_sha256(root: Path, folder: str) -> str:
    """Return the checksum of names and contents of the tracked files; raises as `tracked_files`."""
    paths, top = tracked_files(root, folder), root / folder
    files = {path.relative_to(top).as_posix(): sha256_of_file(path) for path in paths}
    return sha256_of_bytes(canonical_json(files).encode())


@contextlib.contextmanager
def locked(file: Path, *, seconds: float = -1, busy: TwinrunError | None = None) -> Iterator[None]:
    """Hold the lock that `file` stands for; it is left where it is.

    Args:
        seconds: how long to wait for who holds it; for ever where negative.
        busy: raised where somebody holds it; then nobody waits.

    Raises:
        Timeout: somebody holds it still.
        MachineError: the file system has no locks.
    """
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0 if busy else seconds)
    except Timeout as held:
        raise busy or held from None
    except (OSError, NotImplementedError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in _NO_LOCKS:
            raise
        message, found = "the file system has no locks", getattr(error, "strerror", "no flock")
        raise MachineError(message, place=str(file.parent), found=found, hint=_HINT) from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def locked_folder(name: str) -> Iterator[Path]:
    """Hold a folder of the cache, made where it is missing: one process at a time fills it."""
    folder = cache_root() / name
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        yield folder
