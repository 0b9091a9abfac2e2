"""Curves of two records, as of two sites, held against each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.records import falling, training_record
from twinrun.foundation.errors import InputError
from twinrun.results.judged import Judged
from twinrun.results.parity import CurveParity, held_between

STEPS, VOCABULARY = 120, 50368
POINT, RECIPE = "devices=1", "mpt-throughput"
LOSSES = falling(VOCABULARY, STEPS)


def moved(apart: float, since: int = 0) -> tuple[float, ...]:
    """Return the losses, `apart` from a step on, in turn above and below."""
    return tuple(loss * (1 + apart * (step >= since) * (-1) ** step) for step, loss in enumerate(LOSSES))


def traced(apart: float = 0.0, *, controls: int = 10, since: int = 0, **fields: Any) -> Judged:
    """Return a record whose control runs are up to 1e-6 from it."""
    around = [moved(apart + (number - controls / 2) * 2e-7, since) for number in range(controls)]
    return training_record(
        {POINT: 300.0 + apart * 1e6},
        recipe=RECIPE,
        gpu="h200",
        losses=moved(apart, since),
        controls={POINT: around},
        scale="node",
        settings=(f"steps={STEPS}",),
        **fields,
    )


def held(a: Judged, b: Judged, **options: Any) -> Iterator[CurveParity]:
    return iter(held_between(a, b, points=(POINT, POINT), **options))


def test_two_sites_have_one_curve_inside_the_control_runs_of_both() -> None:
    (one,) = held(traced(run="20261101-000000-aaaaaaaa-0000"), traced(3e-7))
    assert one.parity.outcome == "inside", one.parity.reason
    assert (one.a.name[:2], one.b.name[:2]) == ("A:", "B:")


def test_a_run_and_itself_show_nothing() -> None:
    (one,) = held(traced(), traced())
    assert one.parity.outcome == "no-evidence"
    assert "a run and itself are one curve" in one.parity.reason


def test_control_runs_are_asked_for_where_there_are_none() -> None:
    with pytest.raises(InputError, match="no control runs"):
        list(held(traced(), traced(), controls=[traced(controls=0)]))
