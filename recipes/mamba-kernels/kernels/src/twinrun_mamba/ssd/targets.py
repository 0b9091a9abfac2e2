"""Compile SSD's kernels for an architecture on a machine that has none, and count what the code takes.

    python -m twinrun_mamba.ssd.targets gfx90a gfx942 gfx950 sm90

prints registers, spills, shared memory and matrix instructions of every kernel, in bf16 and in fp32.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twinrun_mamba.ssd import backward_kernels, forward_kernels, tuning
from twinrun_mamba.ssd.launch import PASSED, blocks
from twinrun_mamba.ssd.launch_backward import GATED_ROWS
from twinrun_mamba.ssd.sizes import Sizes

PRODUCTS = tuning.KERNELS
PLAIN = ("chunk_sums", "pass_states", "gate_gradients", "pass_gradients", "step_gradients")
KERNELS = (*PRODUCTS, *PLAIN)
# The largest heads, states and chunks that there are; a smaller call takes less.
WIDEST = Sizes(1, 4096, 16, 128, 1, 256, 256)
TENSORS = ("x", "b", "c", "z", "out", "ungated", "kept", "grad", "grads", "dz", "inner", "other", "own", "dx")
TENSORS = (*TENSORS, "dt", "ddt")
FLOATS = ("low", "high")
FP32 = (
    "a",
    "bias",
    "d",
    "steps",
    "sums",
    "states",
    "products",
    "initial",
    "final",
    "added",
    "carried",
    "dsteps",
)
FP32 = (*FP32, "reaching", "skipped", "dproducts", "over_rows", "over_cols", "reading", "da", "dbias")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one compiled kernel takes.

    PTX knows neither registers nor spills: they are given out when it is assembled.
    """

    registers: int | None
    spills: int | None
    shared_bytes: int
    matrix_instructions: int


def compiled(name: str, arch: str, sizes: Sizes, *, dtype: str, **options: Any) -> Any:
    """Compile a kernel as a launch would; `options` are constants that differ from the plainest call."""
    kernel = getattr(forward_kernels, name, None) or getattr(backward_kernels, name)
    row = tuning.options(
        name if name in PRODUCTS else "chunk_states", arch=arch, element_bytes=2 if dtype == "bf16" else 4
    )
    names = list(inspect.signature(kernel.fn).parameters)
    constants = {key: value for key, value in (_constants(sizes, row) | options).items() if key in names}
    if name == "chunk_products":
        constants |= {"N": sizes.N}
    signature = {one: "constexpr" if one in constants else _type(one, name, dtype) for one in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, one in enumerate(names)
        if signature[one].startswith("*") or one.endswith(("_row", "_head", "_batch", "_group"))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    taken = row.compiler() if name in PRODUCTS else {"num_warps": 4}
    return triton.compile(source, target=_target(arch), options=taken)


def resources(name: str, arch: str, sizes: Sizes, *, dtype: str, **options: Any) -> Resources:
    """Compile a kernel and count."""
    found = compiled(name, arch, sizes, dtype=dtype, **options)
    registers: int | None
    spills: int | None
    if arch.startswith("gfx"):
        text = found.asm["amdgcn"]
        registers, spills = (_number(text, rf"\.{one}_count:\s*(\d+)") for one in ("vgpr", "vgpr_spill"))
        matrix = r"^\s*v_mfma_"
    else:
        text = found.asm["ptx"]
        registers = spills = None
        matrix = r"^\s*(?:@\S+\s+)?(?:wgmma\.mma_async|mma\.sync)"
    return Resources(
        registers=registers,
        spills=spills,
        shared_bytes=found.metadata.shared,
        matrix_instructions=len(re.findall(matrix, text, re.MULTILINE)),
    )


def every_kernel(arch: str) -> Iterator[tuple[str, Resources]]:
    """Yield resources of every kernel at the widest sizes, in bf16 and in fp32, with every option."""
    for name in KERNELS:
        for dtype in ("bf16", "fp32"):
            for way in WAYS.get(name, ({},)):
                label = "-".join((name, dtype, *(f"{key}={way[key]}" for key in way)))
                yield label, resources(name, arch, WIDEST, dtype=dtype, **EVERYTHING | way)


EVERYTHING: dict[str, Any] = dict.fromkeys(
    ("HAS_INDEX", "HAS_D", "HAS_Z", "HAS_BIAS", "SOFTPLUS", "HAS_INITIAL", "HAS_FINAL"), True
)
WAYS: dict[str, tuple[dict[str, Any], ...]] = {
    "chunk_states": ({"FORWARD": True}, {"FORWARD": False}),
    "projection_gradients": ({"OF_B": True}, {"OF_B": False}),
}


def _constants(sizes: Sizes, row: tuning.LaunchOptions) -> dict[str, Any]:
    m, k = sizes.in_chunk(row.block_m), sizes.in_chunk(row.block_k)
    return {
        **blocks(sizes, row),
        **dict.fromkeys(EVERYTHING, False),
        "SIZE": sizes.P * sizes.N,
        "BLOCK": PASSED,
        "ROWS": GATED_ROWS,
        "HEADS": sizes.heads_of_a_tile,
        "TALL": sizes.Q // m,
        "WIDE": sizes.Q // k,
        "READING": -(-sizes.N // sizes.in_state(row.block_n)),
        "CARRIED": -(-sizes.P * sizes.N // PASSED),
        "FORWARD": True,
        "OF_B": True,
    }


def _type(name: str, kernel: str, dtype: str) -> str:
    # Only projection_gradients reads states that were narrowed.
    if name == "states" and kernel == "projection_gradients":
        return f"*{dtype}"
    if name in TENSORS:
        return f"*{dtype}"
    if name in FP32:
        return "*fp32"
    if name == "index":
        return "*i32"
    return "fp32" if name in FLOATS else "i32"


def _target(arch: str) -> GPUTarget:
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm")), 32)


def _number(text: str, pattern: str) -> int:
    return max(int(one) for one in re.findall(pattern, text))


def main() -> None:
    """Print the resources of every kernel for the architectures that are named, a line of JSON each."""
    for arch in sys.argv[1:]:
        for label, found in every_kernel(arch):
            print(json.dumps({"arch": arch, "kernel": label, **asdict(found)}), flush=True)


if __name__ == "__main__":
    main()
