"""The parts of a checkpoint: read one by one, and held against the tensors that they must make up."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from pydantic import ValidationError

from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.manifest import CheckpointManifest, Chunk, PartManifest, StoredPart, StoredTensor
from twinrun.checkpoints.safetensors import Entry, header_of
from twinrun.checkpoints.store import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    DamagedError,
    Sink,
    demand_readable,
)

# As long as any other digest: a description with it is as large as the one with the true ones.
NO_DIGEST = "0" * 64


class Piece(NamedTuple):
    """A part of a tensor that is to be written."""

    tensor: str
    offsets: tuple[int, ...]
    entry: Entry


def file_of(pieces: Sequence[Piece]) -> tuple[bytes, int]:
    """Return the header of the file that holds `pieces`, and the size of that file."""
    header = header_of([piece.entry for piece in pieces])
    return header, len(header) + sum(piece.entry.bytes for piece in pieces)


def describe_part(pieces: Iterable[Piece], digests: Iterable[str], *, header_sha256: str) -> PartManifest:
    """Return what a rank says of the file that holds `pieces` one after the other."""
    tensors: defaultdict[str, list[Chunk]] = defaultdict(list)
    for (tensor, offsets, entry), digest in zip(pieces, digests, strict=False):
        chunk = Chunk(key=entry.name, offsets=offsets, sizes=entry.shape, sha256=digest)
        tensors[tensor].append(chunk)
    found = {name: tuple(chunks) for name, chunks in sorted(tensors.items())}
    return PartManifest(header_sha256=header_sha256, tensors=found)


def demand_describable(pieces: Iterable[Piece], *, place: str) -> None:
    """Refuse, before it is written, a part whose description could not be read again; raises RunError."""
    draft = describe_part(pieces, repeat(NO_DIGEST), header_sha256=NO_DIGEST)
    demand_readable(len(draft.text()), place=place, what="the description of a part")


def write_part(
    store: FolderStore,
    pieces: Sequence[Piece],
    write: Callable[[Sink], Iterable[str]],
    *,
    step: int,
    token: int,
    name: str,
) -> StoredPart:
    """Write the file of a part and its description; return what the index says of them.

    Args:
        write: writes the tensors of `pieces` one after the other, and returns their digests.
    """
    header, size = file_of(pieces)
    with store.create(step, token, f"{name}.safetensors") as sink:
        sink.write(header)
        digests = write(sink)
    part = describe_part(pieces, digests, header_sha256=hashlib.sha256(header).hexdigest())
    text = part.text()
    stored = StoredPart(
        name=name, bytes=size, description_bytes=len(text), sha256=hashlib.sha256(text).hexdigest()
    )
    with store.create(step, token, stored.description) as sink:
        sink.write(text)
    return stored


class Box(NamedTuple):
    """A part of a tensor: the first element in each dimension, and the first one after it."""

    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def at(cls, offsets: Sequence[int], sizes: Sequence[int]) -> Box:
        """Return the box of that size at `offsets`."""
        return cls(tuple(offsets), tuple(begin + size for begin, size in zip(offsets, sizes, strict=True)))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(end - begin for begin, end in zip(self.begins, self.ends, strict=True))

    def shared_with(self, other: Box) -> Box | None:
        """Return what two boxes have in common, None where that is nothing."""
        begins = tuple(map(max, self.begins, other.begins))
        ends = tuple(map(min, self.ends, other.ends))
        return Box(begins, ends) if all(map(int.__lt__, begins, ends)) else None


def read_part(store: FolderStore, manifest: CheckpointManifest, number: int) -> PartManifest:
    """Return what a part says of its file, each piece inside of a tensor that the index has.

    Raises:
        DamagedError: it is not what was written, or does not fit to the index.
    """
    stored = manifest.parts[number]
    place = store.file(manifest.step, stored.description)
    part = _parsed(_text(store, manifest.step, stored, place), place)
    for name, chunks in part.tensors.items():
        where, tensor = f"{place}:{name}", manifest.tensors.get(name)
        if tensor is None or not tensor.held_by(number):
            raise DamagedError("a part is where the index has none", place=where, found=name)
        for chunk in chunks:
            _demand_inside(tensor, chunk, where)
    return part


def _text(store: FolderStore, step: int, stored: StoredPart, place: str) -> bytes:
    with store.open(step, stored.description) as source:
        if source.size != stored.description_bytes or source.size > MAX_MANIFEST_BYTES:
            allowed = f"{stored.description_bytes} bytes, at most {MAX_MANIFEST_BYTES}"
            raise DamagedError("another size", place=place, found=f"{source.size} bytes", allowed=allowed)
        text = bytearray(source.size)
        read = source.read_into(memoryview(text), 0)
    found = hashlib.sha256(text[:read]).hexdigest()
    if found != stored.sha256:
        raise DamagedError("the description was changed", place=place, found=found, allowed=stored.sha256)
    return bytes(text)


def _parsed(text: bytes, place: str) -> PartManifest:
    try:
        return PartManifest.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = f"{place}:{'.'.join(map(str, fault['loc']))}"
        raise DamagedError("no description of a part", place=where, found=fault["msg"]) from None


def _demand_inside(tensor: StoredTensor, chunk: Chunk, place: str) -> None:
    if not len(tensor.shape) == len(chunk.offsets) == len(chunk.sizes):
        raise DamagedError("a part has other dimensions than its tensor", place=place, found=chunk.key)
    ends = Box.at(chunk.offsets, chunk.sizes).ends
    if any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
        raise DamagedError("a part lies outside its tensor", place=place, found=chunk.key)


class Coverage:
    """Where the parts of each tensor lie, gathered once over all parts, in 16 bytes a dimension of each."""

    def __init__(self, store: FolderStore, manifest: CheckpointManifest) -> None:
        self._store, self._manifest = store, manifest
        self._placed: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        self._pieces: Counter[str] = Counter()
        self._holders: Counter[str] = Counter()

    def add(self, part: PartManifest) -> None:
        """Take in where the pieces of one part lie."""
        self._holders.update(part.tensors.keys())
        for name, chunks in part.tensors.items():
            self._pieces[name] += len(chunks)
            for chunk in chunks:
                self._placed[name].extend((*chunk.offsets, *chunk.sizes))

    def demand_whole(self) -> None:
        """Raise DamagedError where parts do not tile their tensor, or the index names others that hold it."""
        for name, tensor in self._manifest.tensors.items():
            place = f"{self._store.file(self._manifest.step, MANIFEST)}:{name}"
            if (found := self._holders[name]) != (allowed := sum(1 for _ in tensor.numbers())):
                raise DamagedError(
                    "not every part that the index names holds some of it",
                    place=place,
                    found=f"{found} parts",
                    allowed=f"{allowed} parts",
                )
            demand_tiled(self._boxes(name, len(tensor.shape)), [whole_of(tensor)], place=place)

    def _boxes(self, name: str, dimensions: int) -> list[Box]:
        placed = self._placed.get(name, array("q"))
        if not dimensions:
            return [Box((), ())] * self._pieces[name]
        rows = zip(*[iter(placed)] * (2 * dimensions), strict=True)
        return [Box.at(row[:dimensions], row[dimensions:]) for row in rows]


def whole_of(tensor: StoredTensor) -> Box:
    """Return a tensor as one box."""
    return Box((0,) * len(tensor.shape), tensor.shape)


def demand_tiled(boxes: Iterable[Box], whole: Iterable[Box], *, place: str) -> None:
    """Raise DamagedError where `boxes`, which lie inside of `whole`, leave a gap in it or overlap."""
    filled = [box for box in boxes if box.elements]
    found, allowed = sum(box.elements for box in filled), sum(box.elements for box in whole)
    if found != allowed:
        raise DamagedError(
            "parts do not make up the tensor",
            place=place,
            found=f"{found} elements",
            allowed=f"{allowed} elements",
        )
    if pair := _not_parted(filled):
        both = " and ".join(f"{list(box.begins)} to {list(box.ends)}" for box in pair)
        raise DamagedError("parts overlap", place=place, found=both, allowed="each element once")


def _not_parted(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that no straight cuts part: they overlap, or lie as no run lays them out.

    Each dimension is cut twice at most: first by the tensor's layout over one axis of ranks, and again
    inside each slab where the other axes do not cut it alike.
    """
    groups, dimensions = [boxes] if len(boxes) > 1 else [], len(boxes[0].begins) if boxes else 0
    for dimension in (*range(dimensions), *range(dimensions)):
        slabs = (slab for group in groups for slab in _slabs(group, dimension))
        groups = [slab for slab in slabs if len(slab) > 1]
    return (groups[0][0], groups[0][1]) if groups else None


def _slabs(boxes: list[Box], dimension: int) -> Iterator[list[Box]]:
    """Yield the boxes between one cut across a dimension and the next."""
    ordered = sorted(boxes, key=lambda box: box.begins[dimension])
    slab, end = [ordered[0]], ordered[0].ends[dimension]
    for box in ordered[1:]:
        if box.begins[dimension] >= end:
            yield slab
            slab = []
        slab.append(box)
        end = max(end, box.ends[dimension])
    yield slab


def parts_for(
    store: FolderStore,
    manifest: CheckpointManifest,
    needed: Mapping[str, Sequence[Box]],
    *,
    rank: int = 0,
    world_size: int = 1,
) -> dict[int, PartManifest]:
    """Return the parts that hold what a rank needs, by number, with nothing but what it needs.

    The rank's own part is read first, and others only where it does not hold everything: the nearest ones
    first, and none after the one that completes it.

    Args:
        needed: of each tensor what the rank needs of it.

    Raises:
        DamagedError: a part is not what was written, or they do not make up what is needed.
    """
    found: dict[int, PartManifest] = {}
    missing = {name: sum(box.elements for box in boxes) for name, boxes in needed.items()}
    for name in needed:
        numbers = _nearest(manifest.tensors[name], rank, world_size)
        while missing[name] > 0 and (number := next(numbers, None)) is not None:
            if number in found:
                continue
            found[number] = _cut_to(read_part(store, manifest, number), needed)
            for held, chunks in found[number].tensors.items():
                missing[held] -= sum(box.elements for box in _shared(chunks, needed[held]))
    pieces: defaultdict[str, list[Chunk]] = defaultdict(list)
    for part in found.values():
        for name, chunks in part.tensors.items():
            pieces[name] += chunks
    for name, boxes in needed.items():
        place = f"{store.file(manifest.step, MANIFEST)}:{name}"
        demand_tiled(_shared(pieces[name], boxes), boxes, place=place)
    return {number: part for number, part in sorted(found.items()) if part.tensors}


def _nearest(tensor: StoredTensor, rank: int, world_size: int) -> Iterator[int]:
    """Yield the parts that hold some of a tensor, the likeliest ones for a rank first."""
    if tensor.held_by(rank):
        yield rank
    numbers = list(tensor.numbers())
    if not numbers:
        return
    # Ranks hold rows of a tensor in their order, so that another number of them shifts the places in scale.
    middle = len(numbers) * rank // world_size
    for away in range(len(numbers)):
        for at in {middle + away, middle - away}:
            if 0 <= at < len(numbers) and numbers[at] != rank:
                yield numbers[at]


def _cut_to(part: PartManifest, needed: Mapping[str, Sequence[Box]]) -> PartManifest:
    kept = {
        name: tuple(chunk for chunk in part.tensors[name] if any(True for _ in _shared([chunk], boxes)))
        for name, boxes in needed.items()
        if name in part.tensors
    }
    return part.model_copy(update={"tensors": {name: chunks for name, chunks in kept.items() if chunks}})


def _shared(chunks: Iterable[Chunk], boxes: Sequence[Box]) -> Iterator[Box]:
    for chunk in chunks:
        own = Box.at(chunk.offsets, chunk.sizes)
        yield from (shared for box in boxes if (shared := own.shared_with(box)))


def holders_of(parts: Iterable[Collection[str]]) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return for each tensor which parts hold some of it, from the names that each part holds."""
    found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, names in enumerate(parts):
        for name in names:
            rows = found[name]
            if rows and rows[-1][1] == number - 1:
                rows[-1] = (rows[-1][0], number)
            else:
                rows.append((number, number))
    return {name: tuple(rows) for name, rows in sorted(found.items())}
