"""The safetensors file format: a length, a header in JSON, and the bytes of the tensors.

The package of that name cannot do it: it takes whole tensors in memory or a file on a disk, does not tell
where in the file a tensor begins, and reads no bf16 without torch. Here parts of tensors are hashed while
they are written, and read by their range of bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from twinrun.checkpoints.folder import DamagedError
from twinrun.foundation.files import parse_json

# Bytes of an element, by the name that the format has for its type.
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1}
LENGTH_BYTES = 8
# Readers of the format refuse longer headers.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    """First byte in the file."""

    @property
    def bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


# Key of what a header says beside its tensors: texts by name.
METADATA = "__metadata__"


def header_of(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the first bytes of a file that holds `entries` one after the other."""
    described: dict[str, object] = {METADATA: metadata} if metadata else {}
    offset = 0
    for entry in entries:
        end = offset + entry.bytes
        described[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    # Tensors start at a multiple of eight bytes.
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_bytes(first: bytes, *, place: str) -> int:
    """Return how long the header is that starts with `first`, its length included; raises DamagedError."""
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if len(first) < LENGTH_BYTES or length > MAX_HEADER_BYTES:
        found, allowed = f"a header of {length} bytes", "a whole header"
        raise DamagedError("no safetensors file", place=place, found=found, allowed=allowed)
    return LENGTH_BYTES + length


def parse_header(header: bytes, *, place: str) -> dict[str, Entry]:
    """Return the tensors that a whole header describes, without gaps or overlaps; raises DamagedError."""
    try:
        described = parse_json(header[LENGTH_BYTES:])
        described.pop(METADATA, None)
        entries = {name: _entry(name, one, len(header)) for name, one in described.items()}
        _demand_side_by_side(entries, len(header))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DamagedError("no safetensors header", place=place, found=repr(error)) from None
    return entries


def _entry(name: str, described: dict[str, object], start: int) -> Entry:
    offsets, shape = described["data_offsets"], described["shape"]
    if not isinstance(offsets, list) or not isinstance(shape, list):
        raise TypeError(name)
    entry = Entry(
        name=name,
        dtype=str(described["dtype"]),
        shape=tuple(int(size) for size in shape),
        begin=start + int(offsets[0]),
    )
    if min(entry.begin - start, *entry.shape, 0) < 0 or entry.bytes != int(offsets[1]) - int(offsets[0]):
        raise ValueError(f"{name}: shape and offsets differ")
    return entry


def _demand_side_by_side(entries: Mapping[str, Entry], begin: int) -> None:
    """Raise ValueError where tensors overlap or leave a gap, which the format does not allow."""
    for entry in sorted(entries.values(), key=lambda one: (one.begin, one.bytes)):
        if entry.begin != begin:
            raise ValueError(f"{entry.name} begins at byte {entry.begin}, the one before it ends at {begin}")
        begin += entry.bytes
