"""A checkpoint of one small tensor, written without torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from twinrun.checkpoints.folder import FolderStore, Sink
from twinrun.checkpoints.manifest import FORMAT, CheckpointManifest, StoredTensor
from twinrun.checkpoints.parts import Piece, write_part
from twinrun.checkpoints.safetensors import Entry

VALUES = bytes(range(24))


def write(
    store: FolderStore,
    *,
    step: int,
    token: int,
    identity: dict[str, str] | None = None,
    version: int = FORMAT,
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


def place_of(folder: Path, *, seed: str = "17", steps: tuple[int, ...] = (2, 4, 6)) -> FolderStore:
    """Return a place with checkpoints of some steps."""
    store = FolderStore(folder)
    token = store.claim("run")
    for step in steps:
        write(store, step=step, token=token, identity={"seed": seed})
    return store
