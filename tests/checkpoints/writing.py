"""Checkpoints of one small tensor, written without torch, and a file system that has errors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from twinrun.checkpoints import folder
from twinrun.checkpoints.folder import FolderStore, Sink
from twinrun.checkpoints.manifest import FORMAT, CheckpointManifest, StoredTensor
from twinrun.checkpoints.parts import Piece, write_part
from twinrun.checkpoints.safetensors import Entry

VALUES = bytes(range(24))


def write(
    store: FolderStore, *, step: int, token: int, identity: Any = None, version: int = FORMAT
) -> CheckpointManifest:
    """Save a tensor of two rows in two parts, a file each, as two ranks do."""
    parts = []
    for rank in range(2):
        entry = Entry(name=f"model.weight@{rank},0", dtype="F32", shape=(1, 3))
        data = VALUES[rank * 12 : rank * 12 + 12]

        def put(sink: Sink, data: bytes = data) -> list[str]:
            sink.write(data)
            return [hashlib.sha256(data).hexdigest()]

        store.begin(step, token, needed=len(data))
        pieces, name = [Piece("model.weight", (rank, 0), entry)], f"rank-{rank:05d}"
        parts.append(write_part(store, pieces, put, step=step, token=token, name=name))
    manifest = CheckpointManifest(
        format=version,
        step=step,
        samples=step * 16,
        token=token,
        identity=identity or {"seed": "17"},
        layout={"world_size": "2"},
        parts=tuple(parts),
        tensors={"model.weight": StoredTensor(dtype="F32", shape=(2, 3), holders=((0, 1),))},
    )
    store.commit(step, token, manifest.text())
    return manifest


def place_of(place: Path, *, seed: str = "17", steps: tuple[int, ...] = (2, 4, 6)) -> FolderStore:
    """Return a place with checkpoints of some steps."""
    store = FolderStore(place)
    token = store.claim("run")
    for step in steps:
        write(store, step=step, token=token, identity={"seed": seed})
    return store


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
