"""Output and gradients of SSD against float64, for every option; on a processor in Triton's interpreter."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from twinrun_mamba import mamba_chunk_scan_combined
from twinrun_mamba.ssd.reference import reference_chunk_scan

from twinrun.train.measure import distance, poisoned

# What Triton's interpreter does with NumPy.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALLOWED = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
EVERYTHING = ("D", "z", "dt_bias", "initial_states", "seq_idx")

# Batch, length, heads, head size, groups, states, chunk; then optional tensors and other options.
CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "plain": ((2, 33, 1, 32, 1, 16, 32), (), {}),
    "length 1": ((1, 1, 2, 32, 1, 16, 16), EVERYTHING, {"dt_softplus": True}),
    "length 127": ((1, 127, 1, 32, 1, 16, 64), EVERYTHING, {"dt_softplus": True}),
    "everything": ((1, 40, 4, 32, 2, 24, 32), EVERYTHING, {"dt_softplus": True, "dt_limit": (0.1, 1.5)}),
    "D of every column": ((1, 20, 2, 40, 2, 16, 16), ("D of columns", "z"), {"dt_softplus": True}),
    "head size 128": ((1, 16, 1, 128, 1, 16, 16), ("D",), {}),
    "256 states": ((1, 20, 1, 32, 1, 256, 32), ("initial_states",), {}),
    "wide states": ((1, 20, 2, 32, 1, 16, 16), EVERYTHING, {"state_dtype": torch.float32}),
    "not a number": ((3, 20, 2, 16, 2, 16, 16), ("D of columns", "z", "dt_bias", "initial_states"), {}),
}
DTYPES = {"everything": torch.bfloat16, "wide states": torch.float16, "D of every column": torch.bfloat16}


def inputs(case: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return leaves, and what has no gradient."""
    (batch, length, heads, size, groups, states, chunk), optional, options = CASES[case]
    dtype = DTYPES.get(case, torch.float32)
    row, projection = (batch, length, heads, size), (batch, length, groups, states)
    found = {
        "x": torch.randn(row, dtype=dtype),
        "dt": torch.randn(row[:3], dtype=dtype),
        "A": -torch.rand(heads) - 0.1,
        "B": torch.randn(projection, dtype=dtype),
        "C": torch.randn(projection, dtype=dtype),
    }
    if not options.get("dt_softplus"):
        found["dt"] = 0.2 * found["dt"].abs()
    extra = {
        "D": torch.randn(heads),
        "D of columns": torch.randn(heads, size),
        "z": torch.randn(row, dtype=dtype),
        "dt_bias": torch.randn(heads),
        "initial_states": torch.randn(batch, heads, size, states),
    }
    found |= {name.partition(" ")[0]: extra[name] for name in optional if name in extra}
    leaves = {name: tensor.to(DEVICE).requires_grad_() for name, tensor in found.items()}
    given = {"chunk_size": chunk, **options}
    if "seq_idx" in optional:
        given["seq_idx"] = (torch.arange(length, device=DEVICE) // 13).expand(batch, -1)
    return leaves, given


@pytest.mark.parametrize("case", [case for case in CASES if case != "not a number"])
def test_output_and_gradients(case: str) -> None:
    torch.manual_seed(7)
    leaves, options = inputs(case)
    with poisoned():
        found = mamba_chunk_scan_combined(**leaves, **options, return_final_states=True)
        grads = tuple(torch.randn_like(one) for one in found)
        gradients = torch.autograd.grad(found, list(leaves.values()), grads)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in leaves.items()}
    own = {name: value for name, value in options.items() if name not in ("chunk_size", "state_dtype")}
    wanted = reference_chunk_scan(**exact, **own)
    expected = torch.autograd.grad(wanted, list(exact.values()), [one.double() for one in grads])
    allowed = ALLOWED[leaves["x"].dtype]
    assert found[0].dtype is leaves["x"].dtype
    assert all(distance(one, other) < allowed for one, other in zip(found, wanted, strict=True))
    far = {name: distance(one, other) for name, one, other in zip(leaves, gradients, expected, strict=True)}
    assert all(value < 2 * allowed for value in far.values()), far


def test_gradients_repeat_bit_for_bit_and_strides_do_not_matter() -> None:
    leaves, options = inputs("D of every column")
    out = mamba_chunk_scan_combined(**leaves, **options)
    grad = torch.randn_like(out)
    first = torch.autograd.grad(out, list(leaves.values()), grad, retain_graph=True)
    for _ in range(100 if DEVICE == "cuda" else 1):
        again = torch.autograd.grad(out, list(leaves.values()), grad, retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    turned = {
        name: one.detach().transpose(1, -1).contiguous().transpose(1, -1) if one.dim() > 2 else one.detach()
        for name, one in leaves.items()
    }
    assert torch.equal(mamba_chunk_scan_combined(**turned, **options), out)


# What is spoilt in head 1, with a place in it; `grad` is the gradient of the output.
SPOILT: dict[str, dict[str, tuple[int, ...]]] = {
    "in time": {"x": (0, 3, 1, 5), "dt": (1, 9, 1), "z": (2, 19, 1, 0), "grad": (2, 0, 1, 2)},
    "parameters": {"A": (1,), "D": (1, 3), "dt_bias": (1,), "initial_states": (0, 1, 2, 3)},
}


def spoilt_leaves() -> dict[str, Tensor]:
    """Return the tensors of a call of two heads, each with B and C of its own, and the output's gradient."""
    torch.manual_seed(11)
    leaves, _ = inputs("not a number")
    return leaves | {"grad": torch.randn(leaves["x"].shape, device=DEVICE)}


def outcome(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return output, last states and gradients, all with heads or groups first."""
    given = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items() if name != "grad"}
    out, last = mamba_chunk_scan_combined(**given, chunk_size=16, dt_softplus=True, return_final_states=True)
    grads = (leaves["grad"], torch.ones_like(last))
    gradients = torch.autograd.grad((out, last), list(given.values()), grads)
    found = {"out": out, "last": last} | {f"d{name}": one for name, one in zip(given, gradients, strict=True)}
    places = {"last": 1, "dA": 0, "dD": 0, "ddt_bias": 0, "dinitial_states": 1}
    return {name: one.detach().movedim(places.get(name, 2), 0) for name, one in found.items()}


@functools.cache
def good_outcome() -> dict[str, Tensor]:
    return outcome(spoilt_leaves())


@pytest.mark.parametrize(
    ("where", "value"),
    [("in time", float("nan")), ("in time", float("inf")), ("parameters", float("nan"))],
)
def test_what_is_not_finite_stays_in_its_head_and_row(where: str, value: float) -> None:
    leaves, good = spoilt_leaves(), good_outcome()
    with torch.no_grad():
        for name, place in SPOILT[where].items():
            leaves[name][place] = value
    found = outcome(leaves)
    for name, one in good.items():
        assert torch.equal(one[0], found[name][0]), name
        assert one.isfinite().all(), name
    assert not all(found[name][1].isfinite().all() for name in good)
    # Nor does it reach other rows.
    leaves = spoilt_leaves()
    with torch.no_grad():
        leaves["x"][0, 3] = value
    found = outcome(leaves)
    for name in ("out", "dx", "ddt", "dz", "dB", "dC", "last"):
        assert torch.equal(good[name][:, 1:], found[name][:, 1:]), name


@pytest.mark.gpu
@pytest.mark.parametrize("length", [100_000, 65_537])
def test_a_long_row_is_its_halves_one_after_the_other(length: int) -> None:
    torch.manual_seed(13)
    row, projection = (1, length, 2, 64), (1, length, 1, 64)
    x, B, C = (torch.randn(shape, device=DEVICE) for shape in (row, projection, projection))
    dt, A = 0.1 * torch.rand(row[:3], device=DEVICE), -torch.rand(2, device=DEVICE)
    out, last = mamba_chunk_scan_combined(x, dt, A, B, C, 256, return_final_states=True)
    half, state, parts = 256 * 177, None, []
    for part in (slice(0, half), slice(half, length)):
        given = (x[:, part], dt[:, part], A, B[:, part], C[:, part], 256)
        options: dict[str, Any] = {"initial_states": state, "return_final_states": True}
        own, state = mamba_chunk_scan_combined(*given, **options)
        parts.append(own)
    assert distance(torch.cat(parts, 1), out) < ALLOWED[torch.float32]
    assert distance(state, last) < ALLOWED[torch.float32]


# torch's own checks call it a dozen times.
@pytest.mark.nightly
def test_the_operators_are_whole() -> None:
    from twinrun_mamba.ssd import ops  # noqa: F401

    leaves, options = inputs("length 1")
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    arguments = (*(leaves[name] for name in names), options["seq_idx"].int(), 16, True, 0.0, 1.0, False)
    forward = torch.ops.twinrun_mamba.ssd_forward.default
    assert set(torch.library.opcheck(forward, (*arguments, torch.float32)).values()) == {"SUCCESS"}
