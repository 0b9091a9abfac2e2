"""Conditions and intervals: what holds, what fails, and what the samples leave undecided."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

import pytest

from twinrun.protocol.measurements import Measurement, sampled
from twinrun.results.interval import LEVEL, Limits, interval_of, quotient
from twinrun.results.verdicts import CONDITIONS, Condition, as_published, as_restated

MET = tuple(Condition(name=name, met=True, seen="seen") for name in CONDITIONS)


def measured(samples: list[float]) -> Measurement:
    return sampled("time", samples, metric="time", unit="ms", per="device")


def test_all_conditions_met_is_the_only_way_to_hold() -> None:
    assert (as_published(MET), as_restated(MET)) == ("reproduced", "holds-here")
    for place, one in enumerate(MET):
        unmet = one.model_copy(update={"met": False})
        changed = (*MET[:place], unmet, *MET[place + 1 :])
        assert as_published(changed) not in ("reproduced", "holds-here"), one.name
        assert as_restated(changed) not in ("reproduced", "holds-here"), one.name
        with pytest.raises(AssertionError, match=one.name):
            as_published((*MET[:place], *MET[place + 1 :]))


def test_the_first_condition_that_is_not_met_decides() -> None:
    unmet = {name: Condition(name=name, met=False, seen="seen") for name in CONDITIONS}
    assert as_published([unmet["direction"], unmet["samples"]]) == "not-comparable"
    assert as_published([unmet["direction"], unmet["stable"]]) == "failed"
    assert (as_published([unmet["direction"]]), as_restated([unmet["direction"]])) == (
        "not-reproduced",
        "fails-here",
    )
    assert as_published([unmet["configuration"]]) == "config-mismatch"
    assert as_restated([unmet["configuration"]]) == "not-comparable"


@pytest.mark.parametrize("count", [3, 5, 8, 20, 50])
@pytest.mark.parametrize("shape", ["normal", "uniform", "slow tail"])
def test_an_interval_has_the_median_as_often_as_it_says(count: int, shape: str) -> None:
    draw = random.Random(f"{count} {shape}")
    shapes: dict[str, Callable[[], float]] = {
        "normal": lambda: draw.gauss(10, 1),
        "uniform": lambda: draw.uniform(9, 11),
        "slow tail": lambda: 10 + (draw.expovariate(1.0) - 0.6931),
    }
    intervals = [interval_of(measured([shapes[shape]() for _ in range(count)])) for _ in range(2000)]
    missed = sum(not one.low <= 10 <= one.high for one in intervals) / len(intervals)
    assert missed <= (1 - LEVEL) * 1.5


def test_an_interval_is_not_the_extremes() -> None:
    found = interval_of(measured([10.0] * 15 + [9.0, 11.0, 10.5, 9.5, 30.0]))
    assert 9.0 <= found.low < found.value < found.high < 17.0


@pytest.mark.parametrize(
    ("better", "samples", "standing"),
    [
        ("higher", [100.0] * 20, "holds"),
        ("higher", [75.0] * 20, "holds"),
        ("higher", [74.9] * 20, "fails"),
        ("higher", [60.0, *[76.0] * 18, 90.0], "undecided"),
        ("lower", [125.0] * 20, "holds"),
        ("lower", [125.1] * 20, "fails"),
        ("equal", [126.0] * 20, "fails"),
        ("equal", [74.0] * 20, "fails"),
        ("equal", [100.0] * 20, "holds"),
    ],
)
def test_an_interval_stands_on_one_side_of_the_limit_or_on_both(
    better: Literal["higher", "lower", "equal"], samples: list[float], standing: str
) -> None:
    limits = Limits.of(100.0, better=better, tolerance=0.25)
    assert limits.standing(interval_of(measured(samples))) == standing


def test_as_many_samples_as_are_said_decide() -> None:
    limits, draw = Limits.of(100.0, better="higher", tolerance=0.0), random.Random(3)
    found = interval_of(measured([draw.gauss(101, 3) for _ in range(20)]))
    needed = limits.samples(found)
    assert needed
    assert needed > 20
    again = [interval_of(measured([draw.gauss(101, 3) for _ in range(4 * needed)])) for _ in range(50)]
    assert sum(limits.standing(one) == "holds" for one in again) > 25


def test_a_distance_is_held_to_the_tolerance_itself() -> None:
    limits = Limits.of(0.0, better="equal", tolerance=0.25)
    assert [limits.standing(interval_of(measured([value]))) for value in (0.0, 0.25, 0.26)] == [
        "holds",
        "holds",
        "fails",
    ]


def test_the_errors_of_both_sides_count_in_a_ratio() -> None:
    draw = random.Random(5)
    over, under = (interval_of(measured([draw.gauss(10, 0.1) for _ in range(20)])) for _ in range(2))
    found = quotient(over, under)
    assert found.low < 1 < found.high
    assert found.high - found.low < (over.high - over.low + under.high - under.low) / 10 + 1e-9
