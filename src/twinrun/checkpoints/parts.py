"""The parts of a checkpoint: what each rank writes, and which of them another rank needs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from twinrun.checkpoints.folder import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FolderStore,
    Sink,
    demand_readable,
    demand_size,
    demand_written,
)
from twinrun.checkpoints.manifest import (
    CheckpointManifest,
    Chunk,
    PartManifest,
    StoredPart,
    parse_described,
)
from twinrun.checkpoints.safetensors import Entry, header_of
from twinrun.foundation.files import sha256_of_bytes


class Piece(NamedTuple):
    """A part of a tensor that is to be written."""

    tensor: str
    offsets: tuple[int, ...]
    entry: Entry


def file_of(pieces: Sequence[Piece]) -> tuple[bytes, int]:
    """Return the header of the file that holds `pieces`, and the size of that file."""
    header = header_of([piece.entry for piece in pieces])
    return header, len(header) + sum(piece.entry.bytes for piece in pieces)


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

    Raises RunError where the description could not be read again.

    Args:
        write: writes the tensors of `pieces` one after the other, and returns their digests.
    """
    header, size = file_of(pieces)
    with store.create(step, token, f"{name}.safetensors") as sink:
        sink.write(header)
        digests = write(sink)
    tensors: defaultdict[str, list[Chunk]] = defaultdict(list)
    for piece, digest in zip(pieces, digests, strict=True):
        chunk = Chunk(key=piece.entry.name, offsets=piece.offsets, sizes=piece.entry.shape, sha256=digest)
        tensors[piece.tensor].append(chunk)
    held = {tensor: tuple(chunks) for tensor, chunks in sorted(tensors.items())}
    text = PartManifest(header_sha256=sha256_of_bytes(header), tensors=held).text()
    demand_readable(len(text), place=store.file(step, name), what="the description of a part")
    stored = StoredPart(name=name, bytes=size, description_bytes=len(text), sha256=sha256_of_bytes(text))
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
    """Return what a part says of its file; raises DamagedError where it is not what was written."""
    stored = manifest.parts[number]
    place = store.file(manifest.step, stored.description)
    with store.open(manifest.step, stored.description) as source:
        demand_size(source.size, stored.description_bytes, place)
        text = source.whole(MAX_MANIFEST_BYTES)
    demand_written(sha256_of_bytes(text), stored.sha256, "the description was changed", place=place)
    return parse_described(text, PartManifest, place=place)


def demand_complete(found: Mapping[str, int], wanted: Mapping[str, int], *, place: str) -> None:
    """Raise DamagedError where parts of a tensor have more or fewer elements together than are wanted."""
    for name, elements in wanted.items():
        held, wanted_here = f"{found.get(name, 0)} elements", f"{elements} elements"
        demand_written(held, wanted_here, "parts do not make up the tensor", place=f"{place}:{name}")


def parts_for(
    store: FolderStore,
    manifest: CheckpointManifest,
    needed: Mapping[str, Sequence[Box]],
    *,
    rank: int = 0,
    world_size: int = 1,
) -> dict[int, PartManifest]:
    """Return the parts that hold what a rank needs, by number, with nothing but what it needs.

    The rank's own part is read first, and others only where it does not hold everything: ranks hold rows of a
    tensor in their order, so that another number of them shifts the places in scale.

    Args:
        needed: of each tensor what the rank needs of it.

    Raises:
        DamagedError: a part is not what was written, or they do not make up what is needed.
    """
    kept: dict[int, PartManifest] = {}
    wanted = {name: sum(box.elements for box in boxes) for name, boxes in needed.items()}
    held: Counter[str] = Counter()
    for name in needed:
        numbers = list(manifest.tensors[name].numbers())
        middle = len(numbers) * rank // world_size
        nearest = sorted(range(len(numbers)), key=lambda at: abs(at - middle))
        for number in sorted((numbers[at] for at in nearest), key=lambda one: one != rank):
            if held[name] >= wanted[name]:
                break
            if number not in kept:
                kept[number] = _cut_to(read_part(store, manifest, number), needed)
                for tensor, chunks in kept[number].tensors.items():
                    held[tensor] += sum(box.elements for box in _shared(chunks, needed[tensor]))
    demand_complete(held, wanted, place=store.file(manifest.step, MANIFEST))
    return {number: part for number, part in sorted(kept.items()) if part.tensors}


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
