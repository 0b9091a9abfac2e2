"""How far curves are apart."""

from __future__ import annotations

import math

import pytest

from twinrun.workloads.parity import largest_difference


@pytest.mark.parametrize(
    ("curves", "value", "step"),
    [
        ([(2.0, 1.0), (2.0, 1.5)], 0.5, 2),
        ([(4.0, 1.0), (2.0, 1.0)], 1.0, 1),
        ([(1.0, 1.0), (1.0, 1.0)], 0.0, 1),
        ([(-2.0,), (-1.0,)], 0.5, 1),
        ([(1.0, 1.0), (1.1, 1.2), (1.0, 1.1)], 0.2, 2),
    ],
)
def test_the_distance_is_over_the_lowest_value(
    curves: list[tuple[float, ...]], value: float, step: int
) -> None:
    found, at = largest_difference(curves)
    assert found == pytest.approx(value)
    assert at == step


@pytest.mark.parametrize("curves", [[(1.0, 1.0), (1.0,)], [(1.0, math.inf), (1.0, 1.0)]])
def test_a_curve_that_ends_is_no_number(curves: list[tuple[float, ...]]) -> None:
    value, step = largest_difference(curves)
    assert math.isnan(value)
    assert step == 2
