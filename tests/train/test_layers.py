"""Layers that models share: the shared-exponential GELU against the library's."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.functional import gelu

from twinrun.train.layers import shared_gelu


def test_value_and_gradient_are_exact_to_fp32() -> None:
    x = torch.linspace(-12, 12, 10_001)
    results = []
    # The library's own error in fp32 is larger than ours: hold both against fp64.
    for function, dtype in ((gelu, torch.float64), (shared_gelu, torch.float32)):
        leaf = x.detach().to(dtype).requires_grad_()
        y = function(leaf)
        y.sum().backward()
        results.append((y.detach(), leaf.grad))
    for exact, shared in zip(*results, strict=True):
        torch.testing.assert_close(shared, exact, rtol=0, atol=5e-7, check_dtype=False)


def test_result_keeps_the_type() -> None:
    assert shared_gelu(torch.ones(3, dtype=torch.bfloat16)).dtype is torch.bfloat16
