"""The scan's kernels against float64: emulated everywhere, native on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import checks
import precision
import pytest
import torch
from cases import EMULATED_BACKENDS, SCAN_OPTIONS, TESTED_LENGTHS, Case, ScanCase, emulated, scan_grid
from twinrun_mamba.scan_kernels import _forward_splits
from twinrun_mamba.validation import Sizes

GRID = list(scan_grid(TESTED_LENGTHS))


@pytest.mark.parametrize(("case", "backend"), emulated(GRID), ids=str)
def test_emulated(case: ScanCase, backend: str) -> None:
    checks.fits(case, backend, "cpu", seed=torch.seed() % 2**31)


@pytest.mark.parametrize("backend", EMULATED_BACKENDS)
@pytest.mark.parametrize(
    "check",
    [checks.hard_values, checks.strides, precision.long_sums, precision.long_products],
)
def test_emulated_checks(check: Callable[[str, str], None], backend: str) -> None:
    check(backend, "cpu")


@pytest.mark.parametrize("backend", EMULATED_BACKENDS)
def test_emulated_not_finite(backend: str) -> None:
    checks.not_finite(backend, "cpu")


@pytest.mark.parametrize("backend", ["reference", *EMULATED_BACKENDS])
def test_state_updates(backend: str) -> None:
    checks.state_updates(backend, "cpu")


@pytest.mark.parametrize("backend", EMULATED_BACKENDS)
def test_emulated_repeats(backend: str) -> None:
    checks.repeats(ScanCase(torch.bfloat16, length=70, options=SCAN_OPTIONS), backend, "cpu", times=3)


def test_the_grid_has_scans_in_parts_and_in_one_with_every_number_of_state_tiles() -> None:
    for states in (8, 40, 256):
        given = [case for case in GRID if case.states == states and case.length > 32]
        sizes = [Sizes(case.batch, case.channels, case.length, case.states, case.groups) for case in given]
        assert {1, 5} <= {_forward_splits(one) for one in sizes}


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(scan_grid()), ids=str)
def test_native(case: ScanCase) -> None:
    checks.fits(case, "native", "cuda", seed=torch.seed() % 2**31)


@pytest.mark.gpu
@pytest.mark.parametrize("case", checks.REPEATED, ids=str)
def test_native_repeats(case: Case) -> None:
    checks.repeats(case, "native", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "check",
    [
        *(checks.hard_values, checks.not_finite, checks.strides, checks.state_updates),
        *(precision.long_sums, precision.long_products),
    ],
)
def test_native_checks(check: Callable[[str, str], None]) -> None:
    check("native", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("check", [checks.many_channels, checks.far_offsets])
def test_native_sizes(check: Callable[[str, str], None]) -> None:
    check("native", "cuda")
