"""A tensor of a checkpoint, put together from the parts that ranks wrote."""

from __future__ import annotations

import math
from collections.abc import Iterator

from twinrun.checkpoints.faults import DamagedError
from twinrun.checkpoints.manifest import CheckpointManifest, StoredTensor
from twinrun.checkpoints.safetensors import ITEM_BYTES
from twinrun.checkpoints.store import Store
from twinrun.checkpoints.verification import entry_of, read_chunk, read_entries


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
