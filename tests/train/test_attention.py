"""Finding the kernel by running it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.functional import scaled_dot_product_attention

from twinrun.train.attention import KERNELS, NONE, fastest, only

SIZE_BSHE = (2, 16, 2, 32)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_has_a_fused_kernel(dtype: torch.dtype) -> None:
    assert fastest(SIZE_BSHE, dtype=dtype, device=CPU) == "flash"


def test_only_one_kernel_may_run() -> None:
    q_BHSE = torch.ones(1, 2, 16, 32)
    with only("efficient"), pytest.raises(RuntimeError):
        scaled_dot_product_attention(q_BHSE, q_BHSE, q_BHSE, is_causal=True)


def test_kernels_agree() -> None:
    q_BHSE, k_BHSE, v_BHSE = torch.randn(3, 2, 2, 16, 32)
    results = []
    for kernel in ("flash", "math"):
        with only(kernel):
            results.append(scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, is_causal=True))
    torch.testing.assert_close(*results)


def test_every_name_is_known_to_this_pytorch() -> None:
    for kernel in (*KERNELS, NONE):
        with only(kernel):
            pass
