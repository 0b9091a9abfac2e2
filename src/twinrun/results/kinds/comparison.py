"""Values held against the reference of a question: the comparison that most kinds share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twinrun.results.interval import Interval, Standing
from twinrun.results.question import Question, QuestionValue, RecordQuestion
from twinrun.results.record import Record
from twinrun.workloads.workload import PointRecord


class ValueComparison(NamedTuple):
    """What the values say of a question."""

    standing: Standing
    seen: str
    """The values beside the reference, in words."""
    interval: Interval | None = None
    """The value that is worst for the claim, in the metric's canonical unit; None where it is no number."""
    place: str = ""
    """Where the worst value was found."""


def held_to_reference(question: Question, values: Sequence[QuestionValue]) -> ValueComparison:
    """Hold the value that is worst for the claim against its reference: it decides for all."""
    worst = max(values, key=lambda one: badness(question, one))
    several = f", the worst of {len(values)}" if len(values) > 1 else ""
    standing = question.limits.standing(worst.interval)
    return ValueComparison(
        standing, distance(question, worst.interval), worst.interval, f"{worst.place}{several}"
    )


def badness(question: Question, value: QuestionValue) -> tuple[int, float]:
    """Return what grows as a value gets worse for the claim: first by its interval, then by itself."""
    order: tuple[Standing, ...] = ("holds", "undecided", "fails")
    apart = value.interval.value - question.reference
    worse = {"higher": -apart, "lower": apart, "equal": abs(apart)}[question.better]
    return order.index(question.limits.standing(value.interval)), worse


def distance(question: Question | RecordQuestion, found: Interval) -> str:
    """Say how far a value is from the reference, and what is allowed."""
    change = found.value / question.reference - 1 if question.reference else found.value
    side, tolerance = "above" if change >= 0 else "below", question.asked.tolerance
    digits = 1 if question.restated else 0
    allowed = (
        f"{tolerance:.{digits}%} apart"
        if question.better == "equal"
        else f"{question.better} is better, {tolerance:.{digits}%} worse"
    )
    return (
        f"{abs(change):.1%} {side} the published value; {allowed} is allowed because {question.asked.because}"
    )


def named_or_large(question: Question) -> tuple[PointRecord, ...]:
    """Return the claim's own points, else all that are large enough where their sizes alone name them."""
    own = question.own
    if question.named and all(own):
        found = [point for points in own for point in points]
    elif question.restated and question.places:
        found = sorted(question.record.points, key=lambda point: point.devices)
    else:
        found = []
    least = question.restated.least_devices if question.restated else 1
    return tuple(point for point in found if point.devices >= least)


def names_of(record: Record) -> str:
    """Name the points of a run."""
    return ", ".join(point.id for point in record.points) or "none"
