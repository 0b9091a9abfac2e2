"""SSD's kernels, compiled for GPUs without one: no spills, memory that there is, matrix instructions.

The compiler needs a Triton that is not the interpreter.
"""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch

triton = pytest.importorskip("triton")
from twinrun_kernels.launches import INTERPRETED  # noqa: E402
from twinrun_kernels.targets import SHARED_BYTES, resources  # noqa: E402
from twinrun_mamba.ssd.launch import Call, run_backward, run_forward  # noqa: E402

# Shared memory that one program may have, and registers of a lane with which one wavefront fits a SIMD.
SHARED, MOST_REGISTERS = {**SHARED_BYTES, "sm90": 232448}, 512
PRODUCTS = ("chunk_states", "chunk_products", "chunk_outputs", "value_", "product_", "projection_")
LINKER = next((path for name in ("ld.lld", "ld.lld-19") if (path := shutil.which(name))), None)


def call(dtype: torch.dtype) -> None:
    """Run SSD forwards and backwards with every option, on tensors that have sizes alone: the widest."""

    def empty(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    heads, states = (1, 4096, 16, 128), (1, 4096, 1, 256)
    x, z, grad = (empty(*heads, kind=dtype) for _ in range(3))
    B, C = (empty(*states, kind=dtype) for _ in range(2))
    last, index = empty(1, 16, 128, 256), empty(1, 4096, kind=torch.int32)
    given = (x, empty(*heads[:3], kind=dtype), empty(16), B, C, empty(16), z, empty(16), last, index)
    one = Call(*given, chunk_size=256, softplus=True, low=0.0, high=float("inf"), tf32=False)
    _, _, *kept = run_forward(one, dtype)
    run_backward(one, grad, last, *kept)


@pytest.mark.nightly
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("arch", SHARED)
def test_kernels_fit_the_device(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if LINKER:
        monkeypatch.setenv("TRITON_HIP_LLD_PATH", LINKER)
    elif arch.startswith("gfx") and triton.__version__.startswith("3.3"):
        pytest.skip("Triton 3.3 has no linker for AMD GPUs")
    calls = [partial(call, dtype) for dtype in (torch.bfloat16, torch.float32)]
    found = [one for each in calls for one in resources(each, arch)]
    assert len(found) == 2 * 14
    for one in found:
        assert not one.spills, one
        assert (one.registers or 0) <= MOST_REGISTERS, one
        assert one.shared_bytes <= SHARED[arch], one
        assert one.matrix_instructions > 0 or not one.kernel.startswith(PRODUCTS), one
