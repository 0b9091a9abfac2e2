from __future__ import annotations

from typing import Literal

import pytest

from tests.records import PROJECT
from twinrun.manifests.restatements import Restatement
from twinrun.results.verdicts import (
    Assessment,
    NotAskedError,
    RestatementVerdict,
    judge_claim,
    margin,
    measured_here,
)

CLAIM = next(one for one in PROJECT.recipe("mpt7b-scaling").published.claim if one.here)


def never(here: Restatement) -> RestatementVerdict:
    raise AssertionError(f"{here.statement}: a claim that was judged as published is not restated")


@pytest.mark.parametrize(
    ("better", "value", "side", "holds"),
    [
        ("higher", 110.0, "above", True),
        ("higher", 75.0, "below", True),
        ("higher", 74.9, "below", False),
        ("lower", 90.0, "below", True),
        ("lower", 125.0, "above", True),
        ("lower", 125.1, "above", False),
    ],
)
def test_worse_than_the_tolerance_fails_in_the_direction_of_goodness(
    better: Literal["higher", "lower"], value: float, side: str, holds: bool
) -> None:
    found = margin(value, 100.0, better=better, tolerance=0.25)
    assert (found.side, found.holds) == (side, holds)
    assert found.change == pytest.approx(value / 100 - 1)


@pytest.mark.parametrize(("distance", "holds"), [(0.0, True), (0.25, True), (0.26, False)])
def test_a_distance_is_held_to_the_tolerance_itself(distance: float, holds: bool) -> None:
    assert margin(distance, 0.0, better="equal", tolerance=0.25) == (distance, holds)


@pytest.mark.parametrize(("holds", "outcome"), [(True, "reproduced"), (False, "not-reproduced")])
def test_what_was_judged_as_published_is_the_verdict(holds: bool, outcome: str) -> None:
    verdict = judge_claim(CLAIM, lambda: Assessment(150.0, holds, "because"), never)
    assert (verdict.outcome, verdict.final, verdict.why) == (outcome, outcome, "because")
    assert (verdict.measured, verdict.published, verdict.here) == (150.0, CLAIM.value, None)


def test_a_refusal_keeps_its_reason_its_outcome_and_its_value_and_is_restated() -> None:
    asked: list[Restatement] = []

    def published() -> Assessment:
        raise NotAskedError("fp32", outcome="config-mismatch", measured=150.0)

    def restated(here: Restatement) -> RestatementVerdict:
        asked.append(here)
        return RestatementVerdict(
            statement=here.statement,
            outcome="not-comparable",
            reason="Not asked.",
            published=45.9,
            measured=None,
            metric=here.metric,
            title="MFU",
            unit="%",
        )

    verdict = judge_claim(CLAIM, published, restated)
    assert asked == [CLAIM.here]
    assert (verdict.outcome, verdict.reason, verdict.measured) == ("config-mismatch", "fp32", 150.0)
    assert (verdict.final, verdict.why) == ("config-mismatch", "Not asked.")
    assert verdict.here
    assert measured_here(verdict.here) == "-"
