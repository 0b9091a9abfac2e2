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
from twinrun_mamba import conv_kernels
from twinrun_mamba.launch import Timing


@pytest.mark.parametrize(("case", "backend"), emulated([*conv_grid(TESTED_LENGTHS)]), ids=str)
def test_emulated(case: ConvCase, backend: str) -> None:
    checks.fits(case, backend, "cpu", seed=torch.seed() % 2**31)


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(conv_grid()), ids=str)
def test_native(case: ConvCase) -> None:
    checks.fits(case, "native", "cuda", seed=torch.seed() % 2**31)


@pytest.mark.parametrize("backend", EMULATED_BACKENDS)
def test_emulated_long(backend: str) -> None:
    """Pieces and splits of one sequence meet without a seam."""
    for layout in ("channel-first", "token-major"):
        case = ConvCase(torch.float32, 1, 5, 2500, 4, CONV_OPTIONS, layout)
        checks.fits(case, backend, "cpu")
        checks.repeats(case, backend, "cpu", times=2)


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
def test_emulated_large(dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes load ahead and meet the end of a row anywhere; blocks share a channel, and some have no work."""
    for length in (1016, 1028, 2048, 2312):
        checks.fits(ConvCase(dtype, 3, 5, length, 4, TRAINING_OPTIONS), backend, "cpu")
        checks.fits(ConvCase(dtype, 2, 8, length // 4, 4, TRAINING_OPTIONS, "token-major"), backend, "cpu")
    checks.fits(ConvCase(dtype, 1, 5, 2309, 4, TRAINING_OPTIONS), backend, "cpu")
    for length, width in ((2309, 4), (2312, 4), (2309, 8)):
        checks.fits(ConvCase(dtype, 1, 5, length, width, CONV_OPTIONS - {"seq_idx"}), backend, "cpu")
    conv_kernels._backward_plan.cache_clear()
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
