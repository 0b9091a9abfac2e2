"""The convolution's kernels against float64: emulated everywhere, native on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import checks
import pytest
import torch
from cases import (
    CONV_OPTIONS,
    DTYPES,
    EMULATED_BACKENDS,
    TESTED_LENGTHS,
    TRAINING_OPTIONS,
    ConvCase,
    conv_grid,
    emulated,
)
from hypothesis import given
from hypothesis import strategies as st
from twinrun_mamba import causal_conv1d_fn, causal_conv1d_update, conv_kernels
from twinrun_mamba.launch import Timing

GRID = list(conv_grid(TESTED_LENGTHS))


@pytest.mark.parametrize(("case", "backend"), emulated(GRID), ids=str)
def test_emulated(case: ConvCase, backend: str) -> None:
    checks.fits(case, backend, "cpu", seed=torch.seed() % 2**31)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Treat every tensor as a large one, and the GPU as one that is full with a block."""
    plans = (conv_kernels._forward_plan, conv_kernels._backward_plan)
    monkeypatch.setattr(conv_kernels, "timing", lambda arch: Timing(1, 1, 1, 1, 1))
    monkeypatch.setattr(conv_kernels, "RESIDENT_BLOCKS", 1)
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("backend", EMULATED_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_emulated_large(dtype: torch.dtype, backend: str) -> None:
    """Lanes of large tensors load ahead, and meet the end of a row anywhere in what they loaded."""
    for length in (1016, 1028, 2048, 2312):
        checks.fits(ConvCase(dtype, 3, 5, length, 4, TRAINING_OPTIONS), backend, "cpu")
        checks.fits(ConvCase(dtype, 2, 8, length // 4, 4, TRAINING_OPTIONS, "token-major"), backend, "cpu")
    checks.fits(ConvCase(dtype, 1, 5, 2309, 4, TRAINING_OPTIONS), backend, "cpu")
    for length, width in ((2309, 4), (2312, 4), (2309, 8)):
        checks.fits(ConvCase(dtype, 1, 5, length, width, CONV_OPTIONS - {"seq_idx"}), backend, "cpu")


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("backend", EMULATED_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_emulated_splits(dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that share a channel meet within rows and between them, and some have nothing to do."""
    monkeypatch.setattr(conv_kernels, "SPLIT", 4)
    for batch, length, options in (
        (1, 4096, TRAINING_OPTIONS),
        (3, 2312, TRAINING_OPTIONS),
        (3, 2052, TRAINING_OPTIONS),
        (2, 1032, frozenset[str]()),
        (2, 2309, CONV_OPTIONS - {"seq_idx"}),
    ):
        case = ConvCase(dtype, batch, 5, length, 4, options)
        assert conv_kernels._backward_plan(dtype, (batch, 5, length), 4, "")[3] > 1
        checks.fits(case, backend, "cpu")
    monkeypatch.setattr(conv_kernels, "SPLIT", 1)
    checks.fits(ConvCase(dtype, 1, 5, 1288, 4, TRAINING_OPTIONS), backend, "cpu")


@given(x=st.integers(0, 2**31 - 1), divisor=st.integers(1, 2**31 - 1))
def test_a_reciprocal_divides_exactly(x: int, divisor: int) -> None:
    shift, factor = divmod(conv_kernels._fast_divisor(divisor), 2**32)
    assert shift < 32
    assert (2 * x * factor >> 32) >> shift == x // divisor


@pytest.mark.parametrize("backend", EMULATED_BACKENDS)
def test_emulated_long(backend: str) -> None:
    """Pieces and splits of one sequence meet without a seam."""
    for layout in ("channel-first", "token-major"):
        case = ConvCase(torch.float32, 1, 5, 2500, 4, CONV_OPTIONS, layout)
        checks.fits(case, backend, "cpu")
        checks.repeats(case, backend, "cpu", times=2)


@pytest.mark.parametrize("backend", ["reference", *EMULATED_BACKENDS])
def test_updates(backend: str) -> None:
    checks.updates(backend, "cpu")


@pytest.mark.parametrize("backend", ["reference", *EMULATED_BACKENDS])
def test_prefill_and_update_go_on_where_the_whole_does(backend: str) -> None:
    x, weight = torch.randn(2, 6, 20), torch.randn(6, 4)
    whole = causal_conv1d_fn(x, weight, activation="silu", backend=backend)
    state = torch.empty(2, 6, 3)
    given = {"return_final_states": True, "final_states_out": state, "activation": "silu", "backend": backend}
    _, kept = causal_conv1d_fn(x[..., :15], weight, **given)
    assert kept is state
    rest = [
        causal_conv1d_update(x[..., t], state, weight, None, "silu", backend=backend) for t in range(15, 20)
    ]
    torch.testing.assert_close(torch.stack(rest, 2), whole[..., 15:])


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(conv_grid()), ids=str)
def test_native(case: ConvCase) -> None:
    checks.fits(case, "native", "cuda", seed=torch.seed() % 2**31)


@pytest.mark.gpu
def test_native_updates() -> None:
    checks.updates("native", "cuda")
