"""What compiled kernels use of a GPU, read from what compilers print and from the notes of code objects."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Usage:
    """One kernel of one code object."""

    # Threads of a block, as its launch bound says.
    threads: int
    # 32-bit registers a thread; on AMD those of the vector file, accumulators included.
    registers: int = 0
    # Bytes a thread that did not fit into registers: written and read back, or scratch.
    spills: int = 0
    # Bytes a block, besides the dynamic ones.
    shared_static: int = 0
    # What the kernel itself says of its launches, see launch_sizes.h; 0 registers stand for any.
    registers_needed: int = 0
    shared_base: int = 0
    shared_per_state_tile: int = 0

    def launched(self, array: bytes) -> Usage:
        """Return the same with what `<kernel>_launch` holds."""
        needed, base, a_tile = _LAUNCH.unpack_from(array)
        return replace(self, registers_needed=needed, shared_base=base, shared_per_state_tile=a_tile)

    def as_dict(self) -> dict[str, int]:
        """Return the fields by name."""
        return asdict(self)


_PTX_ENTRY = re.compile(r"\.entry (\w+)\(.*?\.maxntid (\d+)", re.DOTALL)
_PTX_LAUNCH = re.compile(r"\.b8 (\w+)_launch\[12\](?: = \{([\d, ]+)\})?;")
_PTXAS_ENTRY = re.compile(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", re.DOTALL)
# `<kernel>_launch` of launch_sizes.h.
_LAUNCH = struct.Struct("<3i")


def usage_of_ptx(text: str) -> dict[str, Usage]:
    """Return the kernels of PTX; only its assembler knows their registers."""
    # Zeros at the end are left out.
    bytes_of = {
        name: bytes(map(int, filter(None, listed.split(", ")))) for name, listed in _PTX_LAUNCH.findall(text)
    }
    return {
        name: Usage(int(threads)).launched(bytes_of[name].ljust(_LAUNCH.size, b"\0"))
        for name, threads in _PTX_ENTRY.findall(text)
    }


def usage_of_cubin(ptx: str, log: str) -> dict[str, Usage]:
    """Return the kernels of a cubin from the PTX it was made of and what `ptxas -v` printed."""
    found = usage_of_ptx(ptx)
    for name, text in _PTXAS_ENTRY.findall(log):
        found[name] = replace(
            found[name],
            registers=_number(r"Used (\d+) registers", text),
            spills=_number(r"(\d+) bytes spill stores", text) + _number(r"(\d+) bytes spill loads", text),
            shared_static=_number(r"(\d+) bytes smem", text),
        )
    return found


def usage_of_hsaco(path: Path) -> dict[str, Usage]:
    """Return the kernels of an AMD code object from its metadata note and its symbols."""
    image = path.read_bytes()
    launch = {name.removesuffix("_launch"): at for name, at in _symbols(image) if name.endswith("_launch")}
    return {
        kernel[".name"]: Usage(
            threads=kernel[".max_flat_workgroup_size"],
            registers=kernel[".vgpr_count"],
            # Into scratch, or into accumulators.
            spills=max(kernel[".private_segment_fixed_size"], 4 * kernel[".vgpr_spill_count"]),
            shared_static=kernel[".group_segment_fixed_size"],
        ).launched(image[launch[kernel[".name"]] :])
        for kernel in _amd_metadata(image)["amdhsa.kernels"]
    }


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def _amd_metadata(image: bytes) -> Any:
    """Return the MessagePack map of the note AMDGPU 32 (NT_AMDGPU_METADATA) of a 64-bit ELF file."""
    for name, kind, content in _notes(image):
        if name == b"AMDGPU\0" and kind == 32:
            return _unpack(content, 0)[0]
    raise ValueError("no AMDGPU metadata note: not a code object of version 3 or newer")


def _notes(image: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    (headers,) = struct.unpack_from("<Q", image, 0x20)
    size, count = struct.unpack_from("<HH", image, 0x36)
    for index in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", image, headers + index * size)
        at = offset
        while kind == 4 and at < offset + length:  # PT_NOTE
            name_size, content_size, note = struct.unpack_from("<III", image, at)
            content = at + 12 + -(-name_size // 4) * 4
            yield image[at + 12 : at + 12 + name_size], note, image[content : content + content_size]
            at = content + -(-content_size // 4) * 4


def _symbols(image: bytes) -> Iterator[tuple[str, int]]:
    """Return the dynamic symbols of a 64-bit ELF file that lie in a section, and where in the file."""
    (start,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<HH", image, 0x3A)
    # Of a section: type, address, offset, length, and the section of its names.
    sections = [struct.unpack_from("<4xI8xQQQI", image, start + index * size) for index in range(count)]
    for kind, _, offset, length, strings in sections:
        for at in range(offset, offset + length, 24) if kind == 11 else ():  # SHT_DYNSYM
            name, section, value = struct.unpack_from("<IxxHQ", image, at)
            text = sections[strings][2] + name
            if 0 < section < count:
                yield (
                    image[text : image.index(b"\0", text)].decode(),
                    value - sections[section][1] + sections[section][2],
                )


# MessagePack: the first byte says what follows, and its low bits or the next bytes how much of it.
_SIZED = {0xD9: ("str", 1), 0xDA: ("str", 2), 0xDC: ("list", 2), 0xDE: ("dict", 2)}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_INTEGERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """Return the value that starts at a byte, and where it ends."""
    first = data[at]
    at += 1
    if first < 0x80:
        return first, at
    if first in _CONSTANTS:
        return _CONSTANTS[first], at
    if first in _INTEGERS:
        code = _INTEGERS[first]
        return struct.unpack_from(code, data, at)[0], at + struct.calcsize(code)
    if first >= 0xE0:
        return first - 0x100, at
    if first in _SIZED:
        kind, width = _SIZED[first]
        count = int.from_bytes(data[at : at + width], "big")
        at += width
    elif first < 0xC0:
        kind = "dict" if first < 0x90 else "list" if first < 0xA0 else "str"
        count = first & (0x1F if kind == "str" else 0x0F)
    else:
        raise ValueError(f"MessagePack type 0x{first:02x} does not occur in AMD's metadata")
    if kind == "str":
        return data[at : at + count].decode(), at + count
    values = []
    for _ in range(count * 2 if kind == "dict" else count):
        value, at = _unpack(data, at)
        values.append(value)
    return (dict(zip(values[::2], values[1::2], strict=True)) if kind == "dict" else values), at
