"""The reference against formulas written another way, and its gradients against differences."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CONV_OPTIONS, SCAN_OPTIONS, Case, ConvCase, ScanCase, packed, results
from torch import Tensor
from twinrun_mamba import causal_conv1d_fn, reference, reference_conv, selective_scan_fn

TOKENS = ("channel-first", "token-major")
# All options, and each left out.
LEFT_OUT = [
    [options, *(options - {one} for one in sorted(options))] for options in (SCAN_OPTIONS, CONV_OPTIONS)
]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def scan_by_hand(inputs: dict[str, Tensor], index: Tensor | None) -> tuple[list[float], list[float]]:
    """The scan over Python numbers, one channel and one state at a time."""
    u, delta, A, B, C = (inputs[name].tolist() for name in ("u", "delta", "A", "B", "C"))
    D, z, bias, first = (inputs[name].tolist() for name in ("D", "z", "delta_bias", "initial_state"))
    per_group = len(A) // len(B[0])
    out, last = [], []
    for b, d in ((b, d) for b in range(len(u)) for d in range(len(A))):
        g, states = d // per_group, list(first[b][d])
        for t in range(len(u[0][0])):
            if index is not None and t and index[b, t] != index[b, t - 1]:
                states = [0.0] * len(states)
            step = math.log1p(math.exp(delta[b][d][t] + bias[d]))
            y = D[d] * u[b][d][t]
            for n in range(len(states)):
                states[n] = math.exp(step * A[d][n]) * states[n] + step * B[b][g][n][t] * u[b][d][t]
                y += C[b][g][n][t] * states[n]
            out.append(y * z[b][d][t] / (1 + math.exp(-z[b][d][t])))
        last += states
    return out, last


@pytest.mark.parametrize("index", [False, True])
def test_scan_is_the_recurrence(index: bool) -> None:
    case = ScanCase(torch.float64, channels=6, length=41, states=3, groups=2)
    generator = torch.Generator().manual_seed(0)
    inputs = case.inputs(generator)
    starts = packed(case, generator) if index else None
    out, last = scan_by_hand(inputs, starts)
    found = case.call(inputs, backend="reference", seq_idx=starts)
    torch.testing.assert_close(found["out"].flatten(), torch.tensor(out, dtype=torch.float64))
    torch.testing.assert_close(found["last_state"].flatten(), torch.tensor(last, dtype=torch.float64))
    given = {name: tensor.double() for name, tensor in inputs.items()}
    plain, state = reference.selective_scan(**given, seq_idx=starts, softplus=True)
    torch.testing.assert_close(plain.flatten(), torch.tensor(out, dtype=torch.float64))
    torch.testing.assert_close(state.flatten(), torch.tensor(last, dtype=torch.float64))


@pytest.mark.parametrize(
    "case",
    [
        *(ScanCase(torch.float64, 2, 4, 5, 2, 2, each, layout) for each in LEFT_OUT[0] for layout in TOKENS),
        *(ConvCase(torch.float64, 2, 3, 7, 4, each) for each in LEFT_OUT[1]),
    ],
    ids=str,
)
def test_gradients(case: Case) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = {name: tensor.double().requires_grad_() for name, tensor in case.inputs(generator).items()}
    index = packed(case, generator) if "seq_idx" in case.options else None

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(inputs, tensors, strict=True))
        return tuple(case.call(given, backend="reference", seq_idx=index).values())

    assert torch.autograd.gradcheck(run, tuple(inputs.values()))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_hand_written_gradients_are_those_of_autograd(length: int) -> None:
    case = ScanCase(torch.float64, 2, 6, length, 5, 3, SCAN_OPTIONS)
    generator = torch.Generator().manual_seed(2)
    inputs, index = case.inputs(generator), packed(case, generator)
    inputs = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    found = results(case, inputs, "reference", index, 0)
    outputs = reference.selective_scan(**inputs, seq_idx=index, softplus=True)
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(output.shape, generator=random).double() for output in outputs]
    gradients = torch.autograd.grad(outputs, tuple(inputs.values()), weights)
    torch.testing.assert_close(tuple(found[f"grad {name}"] for name in inputs), gradients)


def test_constant_and_complex_projections() -> None:
    u, delta = normal(2, 3, 7), normal(2, 3, 7).abs()
    A, B, C = -torch.rand(3, 2, dtype=torch.float64), normal(3, 2), normal(2, 2, 7)
    constant = selective_scan_fn(u, delta, A, B, C)
    varying = B[None, :, :, None].expand(2, 3, 2, 7)
    spread = C[:, None].expand(2, 3, 2, 7)
    torch.testing.assert_close(constant, selective_scan_fn(u, delta, A, varying, spread))
    # Two conjugate states are one complex state, of which the real part counts twice.
    turned = torch.complex(A[:, :1], normal(3, 1))
    pair = torch.view_as_complex(normal(2, 1, 7, 2).contiguous())
    found = selective_scan_fn(u, delta, turned, *[torch.view_as_real(pair).flatten(2)] * 2)
    state, want = torch.zeros(2, 3, dtype=torch.complex128), []
    for t in range(7):
        step = delta[:, :, t]
        state = torch.exp(step * turned[:, 0]) * state + step * u[:, :, t] * pair[:, :, t]
        want.append(2 * (pair[:, :, t] * state).real)
    torch.testing.assert_close(found, torch.stack(want, 2))


@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("length", [1, 3, 30])
def test_convolution_is_that_of_torch(width: int, length: int) -> None:
    x, weight, bias, before = normal(2, 3, length), normal(3, width), normal(3), normal(2, 3, width - 1)
    joined = torch.cat((before, x), 2)
    wanted = torch.nn.functional.conv1d(joined, weight[:, None], bias, groups=3)
    out, last = causal_conv1d_fn(x, weight, bias, None, before, True)
    torch.testing.assert_close(out, wanted)
    assert torch.equal(last, joined[..., length:])


def test_convolution_of_packed_sequences_is_that_of_each() -> None:
    x, weight, bias = normal(1, 3, 20), normal(3, 4), normal(3)
    x[0, :, 7] = torch.nan
    boundaries = torch.tensor([0, 2, 8, 20], dtype=torch.int32)
    out, last = causal_conv1d_fn(x, weight, bias, return_final_states=True, cu_seqlens=boundaries)
    for start, stop in ((0, 2), (2, 8), (8, 20)):
        alone = reference_conv.conv_forward(x[..., start:stop], weight, bias)
        torch.testing.assert_close(out[..., start:stop], alone[0], equal_nan=True)
    assert torch.equal(last, alone[1])
