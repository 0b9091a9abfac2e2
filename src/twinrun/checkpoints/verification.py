"""Whether a checkpoint is what was written: every byte that is read is held against a digest."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from twinrun.checkpoints.manifest import (
    MANIFEST,
    CheckpointManifest,
    Chunk,
    StoredFile,
    StoredTensor,
    parse_manifest,
)
from twinrun.checkpoints.safetensors import ITEM_BYTES, LENGTH_BYTES, Entry, header_bytes, parse_header
from twinrun.checkpoints.store import STEP, DamagedError, ReadableFile, Store
from twinrun.foundation.errors import InputError

# Fewer would wait for an object store.
LEAST_THREADS = 8
# Checkpoints that are kept: the newest, of which one at least was read back and found good.
KEPT = 2


def threads() -> int:
    """Return how many threads read and hash: they release the interpreter's lock and share the cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(LEAST_THREADS, len(os.sched_getaffinity(0)) // ranks)


def read_manifest(store: Store, step: int) -> CheckpointManifest:
    """Return the manifest of `step`, whole and consistent.

    Raises:
        DamagedError: it is not what was written, or it is another step's.
        InputError: it is of another format.
    """
    place = store.file(step, MANIFEST)
    manifest = parse_manifest(store.manifest(step), place=place)
    if manifest.step != step:
        raise DamagedError(
            "another step's", place=place, found=STEP.format(manifest.step), allowed=STEP.format(step)
        )
    files = {one.name for one in manifest.files}
    for name, tensor in manifest.tensors.items():
        if unknown := {chunk.file for chunk in tensor.chunks} - files:
            raise DamagedError("a part is in no file", place=f"{place}:{name}", found=sorted(unknown))
    return manifest


def read_entries(store: Store, step: int, file: StoredFile, source: ReadableFile) -> dict[str, Entry]:
    """Return the tensors of a file by name, from a header that is as written; raises DamagedError."""
    place = store.file(step, file.name)
    if source.size != file.bytes:
        raise DamagedError(
            "another size", place=place, found=f"{source.size} bytes", allowed=f"{file.bytes} bytes"
        )
    length = header_bytes(bytes(_first(source, LENGTH_BYTES)), place=place)
    header = _first(source, length)
    found = hashlib.sha256(header).hexdigest()
    if found != file.header_sha256:
        raise DamagedError("its header was changed", place=place, found=found, allowed=file.header_sha256)
    return parse_header(bytes(header), place=place)


def entry_of(chunk: Chunk, entries: Mapping[str, Entry], source: ReadableFile, *, place: str) -> Entry:
    """Return where the bytes of a part of a tensor lie in its file; raises DamagedError."""
    entry = entries.get(chunk.key)
    if entry is None or entry.shape != chunk.sizes:
        raise DamagedError(
            "no such tensor in the file", place=place, found=entry and entry.shape, allowed=chunk.key
        )
    if (end := entry.begin + entry.bytes) > source.size:
        raise DamagedError(
            "a tensor ends after the file", place=place, found=f"byte {end}", allowed=f"{source.size} bytes"
        )
    return entry


def read_chunk(source: ReadableFile, entry: Entry, chunk: Chunk, room: memoryview, *, place: str) -> None:
    """Read a part of a tensor into `room`, and hold what is there against its digest; raises DamagedError."""
    with room[: source.read_into(room, entry.begin)] as data:
        found = hashlib.sha256(data).hexdigest()
    if found != chunk.sha256:
        raise DamagedError(f"{chunk.key} was changed", place=place, found=found, allowed=chunk.sha256)


def verify(store: Store, step: int) -> CheckpointManifest:
    """Hold every byte of a checkpoint against its digest; return its manifest.

    Raises:
        DamagedError: names the first file that is wrong, what it should hold and what it holds.
        InputError: it is of another format.
    """
    manifest = read_manifest(store, step)
    with ThreadPoolExecutor(threads()) as pool:
        for file in manifest.files:
            _verify_file(store, manifest, file, pool)
    return manifest


def demand_same(
    theirs: Mapping[str, str], ours: Mapping[str, str], message: str, *, place: str, hint: str | None = None
) -> None:
    """Raise InputError for the first field in which a checkpoint and a run differ, with both sides."""
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise InputError(
                message,
                place=f"{place}:{name}",
                found=theirs.get(name, "nothing"),
                allowed=f"{ours.get(name, 'nothing')}, that of this run",
                hint=hint,
            )


def chunks_of(manifest: CheckpointManifest, file: str) -> Iterator[Chunk]:
    """Yield the parts of tensors that a file holds."""
    for tensor in manifest.tensors.values():
        yield from (chunk for chunk in tensor.chunks if chunk.file == file)


def whole_tensor(store: Store, manifest: CheckpointManifest, tensor: StoredTensor) -> bytearray:
    """Return the bytes of a tensor, put together from its parts; raises DamagedError."""
    item = ITEM_BYTES[tensor.dtype]
    whole = bytearray(math.prod(tensor.shape) * item)
    files = {file.name: file for file in manifest.files}
    for chunk in tensor.chunks:
        place = store.file(manifest.step, chunk.file)
        with store.open(manifest.step, chunk.file) as source:
            entries = read_entries(store, manifest.step, files[chunk.file], source)
            entry = entry_of(chunk, entries, source, place=place)
            data = bytearray(entry.bytes)
            read_chunk(source, entry, chunk, memoryview(data), place=place)
        for position, (begin, length) in enumerate(_rows(tensor.shape, chunk.offsets, chunk.sizes)):
            row = data[position * length * item : (position + 1) * length * item]
            if (begin + length) * item > len(whole):
                raise DamagedError("a part lies outside its tensor", place=place)
            whole[begin * item : (begin + length) * item] = row
    return whole


def retire(store: Store, *, kept: int = KEPT) -> list[int]:
    """Remove all but the newest `kept` checkpoints and return their steps; none where no kept one is good."""
    steps = store.steps()
    old, new = steps[:-kept], steps[-kept:]
    if not old or not any(_is_good(store, step) for step in reversed(new)):
        return []
    for step in old:
        store.remove(step)
    return old


def _verify_file(
    store: Store, manifest: CheckpointManifest, file: StoredFile, pool: ThreadPoolExecutor
) -> None:
    place = store.file(manifest.step, file.name)
    with store.open(manifest.step, file.name) as source:
        entries = read_entries(store, manifest.step, file, source)
        chunks = list(chunks_of(manifest, file.name))

        def read(chunk: Chunk) -> None:
            entry = entry_of(chunk, entries, source, place=place)
            read_chunk(source, entry, chunk, memoryview(bytearray(entry.bytes)), place=place)

        list(pool.map(read, chunks))
        _refuse_uncovered(entries, chunks, place)


def _first(source: ReadableFile, size: int) -> bytearray:
    """Return the first bytes of a file, as many as there are."""
    room = bytearray(min(size, source.size))
    return room[: source.read_into(memoryview(room), 0)]


def _refuse_uncovered(entries: dict[str, Entry], chunks: list[Chunk], place: str) -> None:
    unknown = entries.keys() - {chunk.key for chunk in chunks}
    if unknown:
        raise DamagedError("a tensor that the manifest does not have", place=place, found=sorted(unknown))


def _is_good(store: Store, step: int) -> bool:
    try:
        verify(store, step)
    except (DamagedError, InputError):
        return False
    return True


def _rows(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """Yield first element and length of each run of a part that is without gaps in the whole."""
    if not math.prod(sizes):
        return
    # From this dimension on the part is as wide as the whole.
    full = len(shape)
    while full and sizes[full - 1] == shape[full - 1]:
        full -= 1
    split = max(full - 1, 0)
    strides = [math.prod(shape[one + 1 :]) for one in range(len(shape))]
    length = math.prod(sizes[split:])
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for number in range(math.prod(sizes[:split])):
        begin, rest = base, number
        for one in reversed(range(split)):
            rest, place = divmod(rest, sizes[one])
            begin += place * strides[one]
        yield begin, length
