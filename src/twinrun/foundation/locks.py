"""Locks between processes that share a folder, and what to say where its file system has none."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from twinrun.foundation.errors import MachineError

# NFS without its lock daemon, Lustre without `flock` and several user-space file systems answer so.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


@contextlib.contextmanager
def locked(file: Path, *, seconds: float = -1) -> Iterator[None]:
    """Hold the lock that `file` stands for; it is left where it is.

    Args:
        seconds: how long to wait for who holds it; for ever where negative.

    Raises:
        Timeout: somebody holds it still.
        MachineError: the file system has no locks.
    """
    lock = FileLock(file)
    try:
        lock.acquire(timeout=seconds)
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
