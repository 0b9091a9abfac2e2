"""A checkpoint of one small tensor, written without torch."""

from __future__ import annotations

import hashlib

from twinrun.checkpoints.manifest import FORMAT, CheckpointManifest, Chunk, StoredFile, StoredTensor
from twinrun.checkpoints.safetensors import Entry, header_of
from twinrun.checkpoints.store import Store
from twinrun.foundation.files import sha256_of_bytes

VALUES = bytes(range(24))


def write(
    store: Store, *, step: int, token: int, identity: dict[str, str] | None = None, version: int = FORMAT
) -> CheckpointManifest:
    """Save a tensor of two rows in two parts, a file each, as two ranks do."""
    files, chunks, known = [], [], store.steps()
    for rank in range(2):
        name, key = f"rank-{rank:05d}.safetensors", f"model.weight@{rank},0"
        header = header_of([Entry(name=key, dtype="F32", shape=(1, 3))])
        data = VALUES[rank * 12 : rank * 12 + 12]
        store.begin(step, token, needed=len(header) + len(data))
        with store.create(step, token, name) as sink:
            sink.write(header)
            sink.write(data)
        files.append(
            StoredFile(
                name=name,
                bytes=len(header) + len(data),
                header_sha256=hashlib.sha256(header).hexdigest(),
            )
        )
        digest = hashlib.sha256(data).hexdigest()
        chunks.append(Chunk(file=name, key=key, offsets=(rank, 0), sizes=(1, 3), sha256=digest))
    manifest = CheckpointManifest(
        format=version,
        step=step,
        samples=step * 16,
        token=token,
        previous=sha256_of_bytes(store.manifest(known[-1])) if known else None,
        identity=identity or {"seed": "17"},
        layout={"world_size": "2"},
        files=tuple(files),
        tensors={"model.weight": StoredTensor(dtype="F32", shape=(2, 3), chunks=tuple(chunks))},
    )
    store.commit(step, token, manifest.text())
    return manifest
