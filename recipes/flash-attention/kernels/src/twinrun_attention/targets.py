"""Compile the kernels for an architecture on a machine that has none, and read what the assembly says.

    python -m twinrun_attention.targets gfx90a gfx942 gfx950

prints registers, spills, shared memory, occupancy and matrix instructions of every kernel of the table.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twinrun_attention import backward_kernels, decode_kernel, forward_kernel, tuning
from twinrun_attention.tuning import LaunchOptions

KERNELS = {
    "forward": forward_kernel.forward,
    "backward_keys": backward_kernels.backward_keys,
    "backward_queries": backward_kernels.backward_queries,
    "decode": decode_kernel.decode,
}
HEAD_SIZES = (32, 64, 128, 256)
# What a kernel is compiled with to see every option at once.
EVERYTHING = {"HAS_LEFT": True, "HAS_SLOPES": True, "CAPPED": True, "VARLEN": True, "GROUP": 8}
# Registers of a lane that the wavefronts of a SIMD share.
REGISTERS, MOST_WAVES = 512, 8
FP32 = ("lse", "delta", "slopes", "partial", "sums")
INT32 = ("starts_q", "starts_k", "lengths")
FLOATS = ("scale", "cap")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one compiled kernel takes, counted in its assembly."""

    registers: int
    """Of a lane, vector and accumulation together."""
    spills: int
    shared_bytes: int
    waves: int
    """Wavefronts that fit on a SIMD by registers."""
    matrix_instructions: int


def compiled(row: LaunchOptions, *, head_size: int, target: GPUTarget, **options: Any) -> Any:
    """Compile a kernel with a row's options; `options` are constants that differ from plain causal ones."""
    kernel = KERNELS[row.kernel]
    constants = _constants(row, head_size) | options
    names = list(inspect.signature(kernel.fn).parameters)
    signature = {name: "constexpr" if name in constants else _type(name) for name in names}
    taken = {name: value for name, value in constants.items() if name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith(("_row", "_head", "_batch"))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=taken, attrs=aligned)
    return triton.compile(source, target=target, options=row.compiler())


def amd_resources(row: LaunchOptions, *, head_size: int, arch: str, **options: Any) -> Resources:
    """Compile for an AMD architecture and count."""
    found = compiled(row, head_size=head_size, target=GPUTarget("hip", arch, 64), **options)
    text = found.asm["amdgcn"]
    registers = _number(text, "vgpr_count")
    return Resources(
        registers=registers,
        spills=_number(text, "vgpr_spill_count"),
        shared_bytes=found.metadata.shared,
        waves=min(MOST_WAVES, REGISTERS // (-(-max(registers, 1) // 8) * 8)),
        matrix_instructions=len(re.findall(r"^\s*v_mfma_", text, re.MULTILINE)),
    )


def every_row(arch: str) -> Iterator[tuple[LaunchOptions, int]]:
    """Yield the row of each kernel and head size, as a launch chooses it."""
    for kernel in KERNELS:
        for head_size in HEAD_SIZES:
            yield tuning.options(kernel, arch=arch, head_size=head_size, causal=True), head_size


def _constants(row: LaunchOptions, head_size: int) -> dict[str, Any]:
    return {
        "GROUP": 1,
        "D": head_size,
        "COLS": head_size,
        "BLOCK_M": row.block_m,
        "BLOCK_N": row.block_n,
        "HAS_LEFT": False,
        "HAS_RIGHT": True,
        "END": True,
        "HAS_SLOPES": False,
        "CAPPED": False,
        "VARLEN": False,
        "EVEN": False,
        "DESCRIBED": False,
    }


def _type(name: str) -> str:
    if name in FP32:
        return "*fp32"
    if name in INT32:
        return "*i32"
    if name in ("q", "k", "v", "out", "grad", "dq", "dk", "dv"):
        return "*bf16"
    return "fp32" if name in FLOATS else "i32"


def _number(text: str, name: str) -> int:
    return max(int(one) for one in re.findall(rf"\.{name}:\s*(\d+)", text))


def main() -> None:
    """Print the resources of every row of the architectures that are named."""
    for arch in sys.argv[1:]:
        for row, head_size in every_row(arch):
            found = asdict(amd_resources(row, head_size=head_size, arch=arch))
            print(f"{arch} {row.kernel} d={head_size}", *(f"{name}={value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
