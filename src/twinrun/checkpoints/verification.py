"""Whether a checkpoint is what was written: every byte that is read is held against a digest."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.manifest import (
    CheckpointManifest,
    Chunk,
    PartManifest,
    StoredPart,
    parse_manifest,
)
from twinrun.checkpoints.parts import Box, Coverage, demand_tiled, read_part, whole_of
from twinrun.checkpoints.safetensors import ITEM_BYTES, LENGTH_BYTES, Entry, header_bytes, parse_header
from twinrun.checkpoints.store import (
    LATEST,
    MANIFEST,
    MAX_STATE_BYTES,
    SIGNATURE,
    STEP,
    DamagedError,
    ReadableFile,
)
from twinrun.foundation.errors import InputError
from twinrun.foundation.signatures import UNSIGNED, demand_signed, signed_by, signers_of

# Fewer would wait for an object store.
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


def read_manifest(store: FolderStore, step: int, *, beside: bool = True) -> CheckpointManifest:
    """Return the index of `step`, whole and consistent, its files beside it.

    Args:
        beside: whether to look at what lies beside it; of many ranks one does.

    Raises:
        DamagedError: it is not what was written, it is another step's, or a file is missing, of another size,
            more than the index has, or no file at all.
        InputError: it is of another format.
    """
    place = store.file(step, MANIFEST)
    manifest = parse_manifest(store.manifest(step), place=place)
    if manifest.step != step:
        raise DamagedError(
            "another step's", place=place, found=STEP.format(manifest.step), allowed=STEP.format(step)
        )
    if beside:
        _demand_contents(store, manifest)
    return manifest


def _demand_contents(store: FolderStore, manifest: CheckpointManifest) -> None:
    """Hold what lies beside a manifest against it, before any of it is opened; raises DamagedError."""
    found = store.contents(manifest.step)
    sizes = {part.file: part.bytes for part in manifest.parts}
    sizes |= {part.description: part.description_bytes for part in manifest.parts}
    for name in sorted(found.keys() - sizes.keys() - {SIGNATURE}):
        place = store.file(manifest.step, name)
        raise DamagedError(
            "a file that the manifest does not have", place=place, found=f"{found[name]} bytes"
        )
    for name, size in sizes.items():
        place = store.file(manifest.step, name)
        if name not in found:
            raise DamagedError("missing", place=place, found="no file", allowed="the file")
        if found[name] != size:
            raise _another_size(place, found[name], size)


def _another_size(place: str, found: int, allowed: int) -> DamagedError:
    return DamagedError("another size", place=place, found=f"{found} bytes", allowed=f"{allowed} bytes")


def read_entries(stored: StoredPart, header_sha256: str, source: ReadableFile, *, place: str) -> Entries:
    """Return the tensors of a file by name, from a header that is as written; raises DamagedError."""
    if source.size != stored.bytes:
        raise _another_size(place, source.size, stored.bytes)
    length = header_bytes(bytes(_first(source, LENGTH_BYTES)), place=place)
    header = _first(source, length)
    found = hashlib.sha256(header).hexdigest()
    if found != header_sha256:
        raise DamagedError("its header was changed", place=place, found=found, allowed=header_sha256)
    entries = parse_header(bytes(header), place=place)
    if (end := length + sum(entry.bytes for entry in entries.values())) != source.size:
        raise DamagedError(
            "bytes that no tensor has", place=place, found=f"{source.size} bytes", allowed=f"{end} bytes"
        )
    return entries


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
        _demand_digest(hashlib.sha256(data).hexdigest(), chunk, place)


def _hold(source: ReadableFile, entry: Entry, chunk: Chunk, *, place: str) -> None:
    """Hold a part of a tensor against its digest, piece by piece: it may be larger than the memory."""
    digest, done = hashlib.sha256(), 0
    room = memoryview(bytearray(min(entry.bytes, PIECE_BYTES)))
    while done < entry.bytes:
        got = source.read_into(room[: entry.bytes - done], entry.begin + done)
        if not got:
            break
        digest.update(room[:got])
        done += got
    _demand_digest(digest.hexdigest(), chunk, place)


def _demand_digest(found: str, chunk: Chunk, place: str) -> None:
    if found != chunk.sha256:
        raise DamagedError(f"{chunk.key} was changed", place=place, found=found, allowed=chunk.sha256)


def verify(store: FolderStore, step: int) -> CheckpointManifest:
    """Hold every byte of a checkpoint against its digest; return its manifest.

    Raises:
        DamagedError: names the first file that is wrong, what it should hold and what it holds.
        InputError: it is of another format.
    """
    manifest = read_manifest(store, step)
    coverage = Coverage(store, manifest)
    with ThreadPoolExecutor(threads()) as pool:
        for number, stored in enumerate(manifest.parts):
            part = read_part(store, manifest, number)
            coverage.add(part)
            _verify_file(store, manifest, stored, part, pool)
    coverage.demand_whole()
    return manifest


def signature_at(store: FolderStore, step: int, digest: str, *, signers: Path) -> str:
    """Return who signed the manifest of a checkpoint, in words; raises InputError where it does not match."""
    if SIGNATURE not in (files := store.contents(step)):
        return UNSIGNED
    with store.open(step, SIGNATURE) as source, tempfile.NamedTemporaryFile() as copy:
        room = bytearray(min(files[SIGNATURE], MAX_STATE_BYTES))
        source.read_into(memoryview(room), 0)
        copy.write(room)
        copy.flush()
        try:
            return signed_by(digest, Path(copy.name), signers=signers)
        except InputError as error:
            if error.place == copy.name:
                error.place = store.file(step, SIGNATURE)
            raise


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
        raise DamagedError(
            "another manifest than was published", place=place, found=found, allowed=latest.sha256
        )


def broken_links(
    store: FolderStore, manifests: Mapping[int, CheckpointManifest | None]
) -> dict[int | str, DamagedError]:
    """Return what is wrong between the checkpoints of a place, by step or name.

    Each names the manifest before it, all are of one run, and the newest is what was published last.

    Args:
        manifests: of each step, oldest first; None for a damaged one, which is named elsewhere.
    """
    found: dict[int | str, DamagedError] = {
        name: DamagedError("no name of a checkpoint", place=f"{store.place}/{name}", allowed=STEP.format(0))
        for name in store.strays()
    }
    for before, after in pairwise(manifests.values()):
        if before and after and (fault := _fault_between(store, before, after)):
            found[after.step] = fault
    for manifest in filter(None, manifests.values()):
        try:
            demand_published_checkpoint(store, manifest)
        except DamagedError as fault:
            found[manifest.step] = fault
    return found | _missing_newest(store)


def _missing_newest(store: FolderStore) -> dict[int | str, DamagedError]:
    """Return the checkpoint that was published last where it is gone, or where nothing says which it was."""
    latest, steps = store.latest(), store.steps()
    if latest is None and steps:
        place = f"{store.place}/{LATEST}"
        return {LATEST: DamagedError("does not say which checkpoint is the newest", place=place)}
    if latest is None or latest.step in steps:
        return {}
    return {
        latest.step: DamagedError(
            "missing, though it was published last",
            place=store.file(latest.step, MANIFEST),
            found=f"steps {', '.join(map(str, steps))}" if steps else "no checkpoint",
            hint="it was removed, put aside in quarantine/, or the place was brought back from an older copy",
        )
    }


def _fault_between(
    store: FolderStore, before: CheckpointManifest, after: CheckpointManifest
) -> DamagedError | None:
    place = store.file(after.step, MANIFEST)
    for name in sorted(before.identity.keys() | after.identity.keys()):
        ours, theirs = before.identity.get(name, "nothing"), after.identity.get(name, "nothing")
        if ours != theirs:
            allowed = f"{ours}, that of step {before.step}"
            return DamagedError("of another run", place=f"{place}:{name}", found=theirs, allowed=allowed)
    if after.previous != before.digest():
        return DamagedError(
            "does not go on from the checkpoint before it",
            place=f"{place}:previous",
            found=after.previous or "nothing",
            allowed=f"{before.digest()}, the manifest of step {before.step}",
        )
    return None


def demand_same_run(
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


class TensorReader:
    """Reads whole tensors of a checkpoint, put together from parts that are described once."""

    def __init__(self, store: FolderStore, manifest: CheckpointManifest, names: Iterable[str]) -> None:
        """Find where the parts of the tensors `names` lie; raises DamagedError."""
        self._store, self._manifest = store, manifest
        self._found: dict[str, list[tuple[int, Chunk, Entry]]] = {name: [] for name in names}
        numbers = {one for name in self._found for one in manifest.tensors[name].numbers()}
        for number in sorted(numbers):
            self._find(number, read_part(store, manifest, number))

    def _find(self, number: int, part: PartManifest) -> None:
        stored = self._manifest.parts[number]
        place = self._store.file(self._manifest.step, stored.file)
        with self._store.open(self._manifest.step, stored.file) as source:
            entries = read_entries(stored, part.header_sha256, source, place=place)
            for name in self._found.keys() & part.tensors.keys():
                self._found[name] += [
                    (number, chunk, entry_of(chunk, entries, source, place=place))
                    for chunk in part.tensors[name]
                ]

    def read(self, name: str) -> bytearray:
        """Return the bytes of a tensor; raises DamagedError."""
        step, tensor = self._manifest.step, self._manifest.tensors[name]
        item = ITEM_BYTES[tensor.dtype]
        boxes = [Box.at(chunk.offsets, chunk.sizes) for _, chunk, _ in self._found[name]]
        demand_tiled(boxes, [whole_of(tensor)], place=f"{self._store.file(step, MANIFEST)}:{name}")
        whole = bytearray(math.prod(tensor.shape) * item)
        for number, chunk, entry in self._found[name]:
            file = self._manifest.parts[number].file
            data = bytearray(entry.bytes)
            with self._store.open(step, file) as source:
                read_chunk(source, entry, chunk, memoryview(data), place=self._store.file(step, file))
            for position, (begin, length) in enumerate(_rows(tensor.shape, chunk.offsets, chunk.sizes)):
                row = data[position * length * item : (position + 1) * length * item]
                whole[begin * item : (begin + length) * item] = row
        return whole


def retire(store: FolderStore, *, kept: int = KEPT) -> list[int]:
    """Remove all but the newest `kept` checkpoints and return their steps; none where no kept one is good."""
    steps = store.steps()
    old, new = steps[:-kept], steps[-kept:]
    if not old or not any(_is_good(store, step) for step in reversed(new)):
        return []
    for step in old:
        store.remove(step)
    return old


def _verify_file(
    store: FolderStore,
    manifest: CheckpointManifest,
    stored: StoredPart,
    part: PartManifest,
    pool: ThreadPoolExecutor,
) -> None:
    place = store.file(manifest.step, stored.file)
    with store.open(manifest.step, stored.file) as source:
        entries = read_entries(stored, part.header_sha256, source, place=place)

        def read(chunk: Chunk) -> None:
            _hold(source, entry_of(chunk, entries, source, place=place), chunk, place=place)

        chunks = [chunk for of_tensor in part.tensors.values() for chunk in of_tensor]
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


def _is_good(store: FolderStore, step: int) -> bool:
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
