"""Locks between processes that share a folder, and patience with the file system that it is on."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import MachineError, TwinrunError

Found = TypeVar("Found")

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


# What file servers say while they are away, and disks while somebody makes room.
_PASSING = {errno.ESTALE, errno.EIO, errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ENOSPC, errno.EDQUOT}
_PASSING |= {errno.ETIMEDOUT, errno.EREMOTEIO, errno.ECONNRESET, errno.ENOTCONN, errno.EHOSTDOWN}
# Seconds between tries: half a minute in all, less than what ends a rank without progress.
WAITS = (0.1, 0.5, 2.0, 10.0, 20.0)


def patiently(action: Callable[[], Found]) -> Found:
    """Return what `action` returns, tried again where the file system may come back; raises its OSError."""
    for seconds in WAITS:
        try:
            return action()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
        time.sleep(seconds)
    return action()
