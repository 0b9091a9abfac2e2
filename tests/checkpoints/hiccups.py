"""A file system that has errors: calls below a folder fail, for some time or for good."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from twinrun.checkpoints import folder

ERRORS = (errno.ESTALE, errno.EIO, errno.EINTR, errno.ENOSPC, "short")
CALLS = ("open", "preadv", "write", "fsync", "rename", "replace", "stat", "listdir")


@contextlib.contextmanager
def failing(
    place: Path, error: int | str, *, calls: tuple[str, ...], first: int, times: int
) -> Iterator[None]:
    """Let `calls` below `place` fail from the `first` one on, so many times; a short one gives a part."""
    seen, waits = 0, (0.0,) * len(folder.WAITS)

    def below(what: Any) -> bool:
        path = Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else os.fspath(what)
        return str(path).startswith(str(place))

    def patched(name: str) -> Any:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal seen
            if not below(arguments[0]):
                return real(*arguments, **options)
            seen += 1
            if not first <= seen < first + times:
                return real(*arguments, **options)
            if isinstance(error, int):
                raise OSError(error, os.strerror(error), str(arguments[0]))
            if name == "preadv":
                return real(arguments[0], [arguments[1][0][: seen % 2]], *arguments[2:])
            return real(arguments[0], arguments[1][:1]) if name == "write" else real(*arguments, **options)

        return mock.patch.object(os, name, call)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(folder, "WAITS", waits))
        for name in calls:
            stack.enter_context(patched(name))
        yield
