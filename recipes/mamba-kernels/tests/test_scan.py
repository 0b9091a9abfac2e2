"""The scan's kernels against float64, and both in hard checks: emulated everywhere, native on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import checks
import pytest
import torch
from cases import EMULATED_BACKENDS, SCAN_OPTIONS, TESTED_LENGTHS, Case, ScanCase, emulated, scan_grid

Check = Callable[[str, str], None]
STEPS = (checks.updates, checks.state_updates)
VALUES = (checks.hard_values, checks.not_finite, checks.strides)
DIGITS = (checks.long_sums, checks.long_products)
ALONE = (checks.many_channels, checks.far_offsets, checks.graph, checks.streams, checks.other_device)
ON_A_GPU = (*VALUES, *DIGITS, *STEPS, *ALONE)


@pytest.mark.parametrize(("case", "backend"), emulated([*scan_grid(TESTED_LENGTHS)]), ids=str)
def test_emulated(case: Case, backend: str) -> None:
    checks.fits(case, backend, "cpu", seed=torch.seed() % 2**31)


@pytest.mark.parametrize(
    ("check", "backend"),
    [
        *product((*VALUES, *DIGITS, *STEPS, checks.prefill), EMULATED_BACKENDS),
        *((check, "reference") for check in (*STEPS, checks.prefill)),
        *(pytest.param(check, "native", marks=pytest.mark.gpu) for check in ON_A_GPU),
    ],
)
def test_checks(check: Check, backend: str) -> None:
    check(backend, "cuda" if backend == "native" else "cpu")


@pytest.mark.parametrize("backend", EMULATED_BACKENDS)
def test_emulated_repeats(backend: str) -> None:
    checks.repeats(ScanCase(torch.bfloat16, length=70, options=SCAN_OPTIONS), backend, "cpu", times=3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(scan_grid()), ids=str)
def test_native(case: Case) -> None:
    checks.fits(case, "native", "cuda", seed=torch.seed() % 2**31)


@pytest.mark.gpu
@pytest.mark.parametrize("case", checks.REPEATED, ids=str)
def test_native_repeats(case: Case) -> None:
    checks.repeats(case, "native", "cuda")
