"""What compiled kernels use of a GPU, read from what compilers print and from the assembly they make."""

from __future__ import annotations

import re
import struct
from dataclasses import asdict, dataclass, replace


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


def usage_of_amd(assembly: str) -> dict[str, Usage]:
    """Return the kernels of an AMD code object from the assembly it was made of, its metadata included."""
    # An item of the list that amdhsa.kernels is.
    kernels = re.split(r"^  - (?=\.)", assembly.partition(".amdgpu_metadata")[2], flags=re.MULTILINE)[1:]
    return dict(_amd_usage(metadata, assembly) for metadata in kernels)


def _amd_usage(metadata: str, assembly: str) -> tuple[str, Usage]:
    fields = dict(re.findall(r"^    \.(\w+): +(\w+)$", metadata, re.MULTILINE))
    name = fields["name"]
    (listed,) = re.findall(rf"^{name}_launch:\n((?:\t\.(?:long|zero)\t.+\n)+)", assembly, re.MULTILINE)
    words = re.findall(r"\.(long|zero)\t(\d+)", listed)
    (body,) = re.findall(rf"^{name}:.*?^\.Lfunc_end", assembly, re.MULTILINE | re.DOTALL)
    # A frame is also given to a kernel that keeps scalar registers in lanes of vector registers, and is then
    # never touched.
    touched = re.search(r"^\s+(scratch|buffer)_(load|store)", body, re.MULTILINE)
    frame = int(fields["private_segment_fixed_size"]) if touched else 0
    array = b"".join(bytes(int(n)) if kind == "zero" else struct.pack("<i", int(n)) for kind, n in words)
    usage = Usage(
        threads=int(fields["max_flat_workgroup_size"]),
        registers=int(fields["vgpr_count"]),
        # Into scratch, or into accumulators.
        spills=max(frame, 4 * int(fields["vgpr_spill_count"])),
        shared_static=int(fields["group_segment_fixed_size"]),
    )
    return name, usage.launched(array)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0
