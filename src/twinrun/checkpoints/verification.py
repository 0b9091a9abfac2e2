"""Whether a checkpoint is what was written: every byte that is read is held against a digest."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from twinrun.checkpoints.folder import (
    LATEST,
    MANIFEST,
    MAX_STATE_BYTES,
    SIGNATURE,
    STEP,
    DamagedError,
    FolderStore,
    ReadableFile,
    demand_size,
    demand_written,
)
from twinrun.checkpoints.manifest import CheckpointManifest, Chunk, PartManifest, StoredPart, parse_manifest
from twinrun.checkpoints.parts import demand_complete, read_part
from twinrun.checkpoints.safetensors import LENGTH_BYTES, Entry, header_bytes, parse_header
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import sha256_of_bytes
from twinrun.foundation.signatures import UNSIGNED, demand_signed, signed_by, signers_of

# Fewer would wait for a file server.
LEAST_THREADS = 8
# Bytes that a thread reads before it hashes them.
PIECE_BYTES = 16 << 20
# Checkpoints that are kept: the newest, of which one at least was read back and found good.
KEPT = 2

Entries = dict[str, Entry]


def threads() -> int:
    """Return how many threads read and hash: they release the interpreter's lock and share the cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(LEAST_THREADS, len(os.sched_getaffinity(0)) // ranks)


def read_manifest(store: FolderStore, step: int) -> CheckpointManifest:
    """Return the index of `step`, whole and consistent, its files beside it.

    Raises:
        DamagedError: it is not what was written, it is another step's, or a file is missing, of another size,
            more than the index has, or no file at all.
        InputError: it is of another format.
    """
    place = store.file(step, MANIFEST)
    manifest = parse_manifest(store.manifest(step), place=place)
    demand_written(STEP.format(manifest.step), STEP.format(step), "another step's", place=place)
    _demand_contents(store, manifest)
    return manifest


def _demand_contents(store: FolderStore, manifest: CheckpointManifest) -> None:
    """Hold what lies beside a manifest against it, before any of it is opened; raises DamagedError."""
    found = store.contents(manifest.step)
    sizes = {part.file: part.bytes for part in manifest.parts}
    sizes |= {part.description: part.description_bytes for part in manifest.parts}
    for name in sorted(found.keys() | sizes.keys() - {SIGNATURE}):
        place = store.file(manifest.step, name)
        if name not in found:
            raise DamagedError("missing", place=place, found="no file", allowed="the file")
        if name not in sizes and name != SIGNATURE:
            size = f"{found[name]} bytes"
            raise DamagedError("a file that the manifest does not have", place=place, found=size)
        demand_size(found[name], sizes.get(name, found[name]), place)


def read_entries(stored: StoredPart, header_sha256: str, source: ReadableFile, *, place: str) -> Entries:
    """Return the tensors of a file by name, from a header that is as written; raises DamagedError."""
    demand_size(source.size, stored.bytes, place)
    header = _first(source, header_bytes(_first(source, LENGTH_BYTES), place=place))
    demand_written(sha256_of_bytes(header), header_sha256, "its header was changed", place=place)
    entries = parse_header(header, place=place)
    demand_size(source.size, len(header) + sum(entry.bytes for entry in entries.values()), place)
    return entries


def _first(source: ReadableFile, size: int) -> bytes:
    """Return the first bytes of a file, as many as there are."""
    room = bytearray(min(size, source.size))
    source.read_into(memoryview(room), 0)
    return bytes(room)


def entry_of(chunk: Chunk, entries: Mapping[str, Entry], *, place: str) -> Entry:
    """Return where the bytes of a part of a tensor lie in its file; raises DamagedError."""
    entry = entries.get(chunk.key)
    if entry is None or entry.shape != chunk.sizes:
        found = entry and entry.shape
        raise DamagedError("no such tensor in the file", place=place, found=found, allowed=chunk.key)
    return entry


def read_chunk(source: ReadableFile, entry: Entry, chunk: Chunk, room: memoryview, *, place: str) -> None:
    """Read a part of a tensor, and hold what is there against its digest; raises DamagedError.

    Args:
        room: as large as the part; or smaller, where it is only looked at, piece by piece.
    """
    digest, done = hashlib.sha256(), 0
    while done < entry.bytes:
        piece = room[: entry.bytes - done]
        if not (got := source.read_into(piece, entry.begin + done)):
            break
        digest.update(piece[:got])
        done += got
    demand_written(digest.hexdigest(), chunk.sha256, f"{chunk.key} was changed", place=place)


def verify(store: FolderStore, step: int) -> CheckpointManifest:
    """Hold every byte of a checkpoint against its digest; return its manifest.

    Raises:
        DamagedError: names the first file that is wrong, what it should hold and what it holds.
        InputError: it is of another format.
    """
    manifest = read_manifest(store, step)
    held: Counter[str] = Counter()
    with ThreadPoolExecutor(threads()) as pool:
        for number in range(len(manifest.parts)):
            for name, chunks in _verified(store, manifest, number, pool).tensors.items():
                held[name] += sum(math.prod(chunk.sizes) for chunk in chunks)
    whole = {name: math.prod(tensor.shape) for name, tensor in manifest.tensors.items()}
    demand_complete(held, dict.fromkeys(held, 0) | whole, place=store.file(step, MANIFEST))
    return manifest


def _verified(store: FolderStore, manifest: CheckpointManifest, number: int, pool: Executor) -> PartManifest:
    part, stored = read_part(store, manifest, number), manifest.parts[number]
    place = store.file(manifest.step, stored.file)
    with store.open(manifest.step, stored.file) as source:
        entries = read_entries(stored, part.header_sha256, source, place=place)

        def look(chunk: Chunk) -> str:
            entry = entry_of(chunk, entries, place=place)
            room = memoryview(bytearray(min(entry.bytes, PIECE_BYTES)))
            read_chunk(source, entry, chunk, room, place=place)
            return chunk.key

        seen = pool.map(look, [chunk for chunks in part.tensors.values() for chunk in chunks])
        if unknown := sorted(entries.keys() - set(seen)):
            raise DamagedError("a tensor that the manifest does not have", place=place, found=unknown)
    return part


def signature_at(store: FolderStore, step: int, digest: str, *, signers: Path) -> str:
    """Return who signed the manifest of a checkpoint, in words; raises InputError where it does not match."""
    if SIGNATURE not in store.contents(step):
        return UNSIGNED
    with store.open(step, SIGNATURE) as source:
        signature = source.whole(MAX_STATE_BYTES).decode(errors="replace")
    return signed_by(digest, signature, place=store.file(step, SIGNATURE), signers=signers)


def demand_signed_checkpoint(store: FolderStore, *, step: int | None, root: Path) -> None:
    """Raise InputError unless a known signer has signed the checkpoint that ranks would go on from.

    Args:
        step: the one that they go on from, None for the newest; where there is none, they begin anew.
    """
    chosen = step or max(store.steps(), default=None)
    if chosen is None:
        return
    # Ranks fall back from a damaged checkpoint to the one before it, which may be unsigned.
    manifest = verify(store, chosen)
    found = signature_at(store, chosen, manifest.digest(), signers=signers_of(root))
    demand_signed(found, place=store.file(chosen, MANIFEST), root=root)


def demand_published_checkpoint(store: FolderStore, manifest: CheckpointManifest) -> None:
    """Raise DamagedError where a manifest is another than the place says was published last."""
    latest, found = store.latest(), manifest.digest()
    if latest and latest.step == manifest.step and latest.sha256 not in (None, found):
        place = store.file(manifest.step, MANIFEST)
        message = "another manifest than was published"
        raise DamagedError(message, place=place, found=found, allowed=latest.sha256)


def faults_between(
    store: FolderStore, manifests: Sequence[CheckpointManifest]
) -> Iterator[tuple[int | str, DamagedError]]:
    """Yield what is wrong between the checkpoints of a place, by step or name.

    Args:
        manifests: of those that are good.
    """
    for name in store.strays():
        place = f"{store.place}/{name}"
        yield name, DamagedError("no name of a checkpoint", place=place, allowed=STEP.format(0))
    for manifest in manifests:
        try:
            demand_published_checkpoint(store, manifest)
        except DamagedError as fault:
            yield manifest.step, fault
    latest, steps = store.latest(), store.steps()
    if latest is None and steps:
        place = f"{store.place}/{LATEST}"
        yield LATEST, DamagedError("does not say which checkpoint is the newest", place=place)
    if latest and latest.step not in steps:
        message, place = "missing, though it was published last", store.file(latest.step, MANIFEST)
        found = f"steps {', '.join(map(str, steps))}" if steps else "no checkpoint"
        hint = "it was removed, put aside in quarantine/, or the place came back from an older copy"
        yield latest.step, DamagedError(message, place=place, found=found, hint=hint)


def demand_same_run(
    theirs: Mapping[str, object],
    ours: Mapping[str, object],
    message: str,
    *,
    place: str,
    whose: str = "this run",
    hint: str | None = None,
) -> None:
    """Raise InputError for the first field in which a checkpoint and a run differ, with both sides."""
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            found, allowed = theirs.get(name, "nothing"), f"{ours.get(name, 'nothing')}, that of {whose}"
            raise InputError(message, place=f"{place}:{name}", found=found, allowed=allowed, hint=hint)


def retire(store: FolderStore, *, kept: int = KEPT) -> list[int]:
    """Remove all but the newest `kept` checkpoints and return their steps; none where no kept one is good."""
    steps = store.steps()
    old, new = steps[:-kept], steps[-kept:]
    for step in reversed(new) if old else ():
        with contextlib.suppress(DamagedError, InputError):
            verify(store, step)
            for one in old:
                store.remove(one)
            return old
    return []
