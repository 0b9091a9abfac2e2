"""Locks between processes that share a folder, and what to say where its file system has none."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import MachineError, TwinrunError

# NFS without its lock daemon, Lustre without `flock` and several user-space file systems answer so.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


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
    except Timeout:
        if busy is None:
            raise
        raise busy from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
        raise MachineError(
            "the file system has no locks",
            place=str(file.parent),
            found=error.strerror if isinstance(error, OSError) else "no flock",
            hint="choose a folder on another file system, TWINRUN_CACHE for the cache, --out for a run and"
            " --checkpoint place= for checkpoints; or mount this one with locks",
        ) from None
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
