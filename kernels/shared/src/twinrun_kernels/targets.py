"""Compile what a call would start for an architecture on a machine that has none, and count what it takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twinrun_kernels import launches, tuning
from twinrun_kernels.launches import Launch

_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64"}
# Least shared memory of a compute unit, that a program must fit in.
SHARED_BYTES = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840}


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one compiled kernel takes, counted in its assembly.

    PTX knows neither registers nor spills: they are given out when it is assembled.
    """

    kernel: str
    registers: int | None
    """Of a lane, vector and accumulation together."""
    spills: int | None
    shared_bytes: int
    matrix_instructions: int


def resources(call: Callable[[], object], arch: str) -> Iterator[Resources]:
    """Yield what each kernel takes that a call on tensors of the device `meta` would start on `gfx942`."""
    with _taken_down(arch) as found:
        call()
    for launch, tensors in found:
        code = _compiled(launch, tensors, arch)
        amd = arch.startswith("gfx")
        text = code.asm["amdgcn" if amd else "ptx"]
        matrix = r"^\s*v_mfma_" if amd else r"^\s*(?:@\S+\s+)?(?:wgmma\.mma_async|mma\.sync)"
        counts = [_most(text, name) if amd else None for name in ("vgpr_count", "vgpr_spill_count")]
        yield Resources(
            kernel=launch.kernel.__name__,
            registers=counts[0],
            spills=counts[1],
            shared_bytes=code.metadata.shared,
            matrix_instructions=len(re.findall(matrix, text, re.MULTILINE)),
        )


@contextmanager
def _taken_down(arch: str) -> Iterator[list[tuple[Launch, tuple[Tensor, ...]]]]:
    """Have launches taken down, with the launch options of an architecture, and none started."""
    tuning.stand_for(arch)
    launches.taken_down = []
    try:
        yield launches.taken_down
    finally:
        launches.taken_down = None
        tuning.stand_for(tuning.PROCESSOR)


def _compiled(launch: Launch, tensors: tuple[Tensor, ...], arch: str) -> Any:
    """Compile a kernel as its start would."""
    kernel, signature, constants, aligned = launch.kernel, {}, {}, {}
    values = (*tensors, *launch.rest)
    for place, (name, value) in enumerate(zip(kernel.arg_names, values)):
        if isinstance(value, Tensor):
            signature[name] = f"*{_TYPES[str(value.dtype).removeprefix('torch.')]}"
        elif kernel.params[place].is_constexpr or value == 1:
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (signature[name] == "i32" and value % 16 == 0):
            aligned[place,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[2:]), 32)
    return triton.compile(source, target=target, options=launch.compiler)


def _most(text: str, name: str) -> int:
    return max(int(one) for one in re.findall(rf"\.{name}:\s*(\d+)", text))
