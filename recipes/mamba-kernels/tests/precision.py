"""What long sums and products keep of fp32's digits.

Each check takes the backend and a device and raises AssertionError; it needs torch, not pytest.
"""

from __future__ import annotations

import math
from itertools import product
from unittest.mock import patch

import torch
from cases import distance
from torch import Tensor
from torch.nn import functional
from twinrun_mamba import causal_conv1d_fn, conv_kernels, scan_kernels, selective_scan_fn
from twinrun_mamba.layout import LAYOUTS, channel_first


def long_sums(backend: str, device: str) -> None:
    """Gradients that sum over many steps: off by less than one long sum, whatever the inputs' type."""
    channels, states, length = 32, 16, 8192
    # Of one sign, so that sums only grow.
    u, out_gradient = torch.rand(2, 1, channels, length, device=device)
    B, C = torch.rand(2, 1, 1, states, length, device=device)
    # With steps of one every decay is a half: what a GPU's exponential is off by would hide the rest.
    A = torch.full((channels, states), -math.log(2), device=device).requires_grad_()
    D = torch.rand(channels, device=device).requires_grad_()
    for dtype in (torch.float32, torch.bfloat16):
        given, gradient = u.to(dtype), out_gradient.to(dtype)
        with patch.object(scan_kernels, "_backward_splits", lambda sizes: 1):
            steps = torch.ones_like(given)
            out = selective_scan_fn(given, steps, A, B.to(dtype), C.to(dtype), D, backend=backend)
            of_a, of_d = torch.autograd.grad(out, (A, D), gradient)
        name = f"{dtype}, gradient of"
        if dtype is torch.float32:
            _keeps_digits(f"{name} A", of_a, _gradient_of_halves(u, out_gradient, B, C), limit=6e-7)
        _keeps_digits(f"{name} D", of_d, (gradient.double() * given.double()).sum((0, 2)), limit=6e-8)

    x, out_gradient = torch.randn(2, 1, 64, 65536, device=device)
    weight = torch.rand(64, 4, device=device).requires_grad_()
    for dtype, layout in product((torch.float32, torch.bfloat16), LAYOUTS):
        rounded = x.to(dtype), out_gradient.to(dtype)
        given_x, gradient = (channel_first(tensor, layout).contiguous() for tensor in rounded)
        # One split along time, and the most steps of a lane through tokens.
        with patch.multiple(conv_kernels, SPLIT=2**20, RESIDENT_BLOCKS=1):
            out = causal_conv1d_fn(given_x, weight, layout=layout, backend=backend)
            (found,) = torch.autograd.grad(out, weight, gradient)
        past = functional.pad(rounded[0].double(), (3, 0)).unfold(2, x.shape[2], 1)
        expected = (past * rounded[1].double()[:, :, None]).sum((0, 3))
        _keeps_digits(f"{dtype}, {layout}, gradient of weight", found, expected, limit=3e-7)


def long_products(backend: str, device: str) -> None:
    """A state that decays for hundreds of steps: the mean factor is off by less than a quarter of 2^-24."""
    channels, states, length = 64, 16, 256
    u = torch.zeros(1, channels, length, device=device)
    B = C = torch.zeros(1, 1, states, length, device=device)
    delta = 0.004 + 0.276 * torch.rand(1, channels, length, device=device)
    A = -1 - 0.1 * torch.rand(channels, states, device=device)
    ones = torch.ones(1, channels, states, device=device)
    options = {"initial_state": ones, "return_last_state": True, "backend": backend}
    _, last = selective_scan_fn(u, delta, A, B, C, **options)
    expected = delta.double().sum(2)[..., None] * A.double()
    away = float((last.double().log() - expected).mean()) / length * 2**24
    assert abs(away) <= 0.25, f"a step's decay is off by {away:.2f} of 2^-24 on average, at most 0.25"


def _gradient_of_halves(u: Tensor, out_gradient: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return the gradient of A in float64, where every step is one and every decay a half."""
    before = _halving(u.double()[:, :, None] * b.double())
    after = _halving((out_gradient.double()[:, :, None] * c.double()).flip(3)).flip(3)
    # A step's decay stands between the state before it and the gradient of the state after it.
    return (before[..., :-1] * after[..., 1:] / 2).sum((0, 3))


def _halving(steps: Tensor) -> Tensor:
    """Return the sum up to each step, of which every further step leaves a half."""
    # Each round doubles the steps that are summed; of what lies 64 steps back nothing is left.
    for lag in (1, 2, 4, 8, 16, 32):
        steps = steps + 0.5**lag * functional.pad(steps, (lag, 0))[..., :-lag]
    return steps


def _keeps_digits(name: str, found: Tensor, expected: Tensor, *, limit: float) -> None:
    away = distance(found, expected.cpu())
    assert away <= limit, f"{name} is off by {away:.1e}, at most {limit:g}"
