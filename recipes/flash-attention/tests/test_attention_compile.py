"""Every kernel for AMD GPUs, compiled without one: no spills, registers and memory that are there.

The compiler needs a Triton that is not the interpreter.
"""

from __future__ import annotations

import shutil
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import triton
from twinrun_attention import ops
from twinrun_kernels.launches import INTERPRETED
from twinrun_kernels.targets import SHARED_BYTES, resources

LINKER = next((path for name in ("ld.lld", "ld.lld-19") if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(
        not LINKER and triton.__version__.startswith("3.3"), reason="Triton 3.3 has no linker for AMD GPUs"
    ),
]
# Registers of a lane with which one wavefront fits a SIMD; spills come before.
MOST_REGISTERS = 512


def call(head_size: int, *, all_of_it: bool) -> None:
    """Run attention forwards and backwards, and decoding, on tensors that have sizes alone."""
    on: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    rows, left, softcap = ((8192,), 100, 5.0) if all_of_it else ((2, 4096), -1, 0.0)
    q, grad = torch.empty(2, *rows, 16, head_size, **on)
    k, v = torch.empty(2, *rows, 2 if all_of_it else 16, head_size, **on)
    starts = torch.empty(3, device="meta", dtype=torch.int32) if all_of_it else None
    slopes = torch.empty(16, device="meta") if all_of_it else None
    given = (slopes, starts, starts, 4096, 4096, head_size**-0.5, left, 0, True, softcap)
    out, lse = ops.attend(q, k, v, *given)
    ops.backward(grad, q, k, v, out, lse, *given)
    if not all_of_it:
        lengths = torch.empty(2, device="meta", dtype=torch.int32)
        ops.attend_to_cache(q[:, :1], k, v, lengths, None, head_size**-0.5, -1, 0, 0.0)


# Of the published GPU the smaller published head size; every night all.
PUBLISHED = ("gfx90a", 64)
OTHERS = [one for one in product(SHARED_BYTES, (32, 64, 128, 256)) if one != PUBLISHED]


@pytest.mark.parametrize(
    ("arch", "size"), [PUBLISHED, *(pytest.param(*one, marks=pytest.mark.nightly) for one in OTHERS)]
)
def test_kernels_fit_the_device(arch: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if LINKER:
        monkeypatch.setenv("TRITON_HIP_LLD_PATH", LINKER)
    calls = [partial(call, size, all_of_it=all_of_it) for all_of_it in (False, True)]
    found = [one for each in calls for one in resources(each, arch)]
    assert [one.kernel for one in found] == [
        *("forward", "row_sums", "backward_keys", "backward_queries", "decode", "combine"),
        *("forward", "row_sums", "backward_keys", "backward_queries"),
    ]
    for one in found:
        assert one.spills == 0, one
        assert one.shared_bytes <= SHARED_BYTES[arch], one
        assert one.registers is not None
        assert one.registers <= MOST_REGISTERS, one
        assert bool(one.matrix_instructions) == (one.kernel not in {"row_sums", "combine"}), one
