"""Claims that two ways give one thing: curves inside the envelope of control runs, or values that agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twinrun.results.interval import Interval, Standing
from twinrun.results.kinds import invariant
from twinrun.results.kinds.comparison import ValueComparison, held_to_reference, names_of
from twinrun.results.parity import held_within
from twinrun.results.question import Question, QuestionValue
from twinrun.results.verdicts import ConditionName, NotAskedError
from twinrun.workloads.curve_distance import CurveOutcome
from twinrun.workloads.workload import PointRecord

# Condition that a parity lacks which could not be decided.
UNDECIDED: dict[CurveOutcome, ConditionName] = {"other-run": "order", "no-envelope": "samples"}


def points(question: Question) -> tuple[PointRecord, ...]:
    """Return the two points of the claim, else all whose curve reaches to the end of the run."""
    if not question.named:
        return question.record.whole
    return tuple(point for found in question.own for point in found)


def lacking(question: Question, found: Sequence[PointRecord]) -> str:
    """Return which points the run lacks, empty where it has two."""
    if question.named and not all(question.own):
        return f"needs the points {' and '.join(question.named)}; this run has {names_of(question.record)}"
    if len(found) > 1:
        return ""
    names = ", ".join(point.id for point in found) or "none"
    return f"needs two whole curves, this run has {names}; `invoke parity A B` holds two records"


def values(question: Question, found: Sequence[PointRecord]) -> Iterator[QuestionValue]:
    """Yield how far each curve is from the first, restated as part of its envelope; or the value of each."""
    if question.terms.metrics[question.claim.metric].series is None:
        yield from invariant.values(question, found)
        return
    for one in held_within(question.claim, question.record, found):
        if condition := UNDECIDED.get(one.outcome):
            raise NotAskedError(f"{one.b} against {one.a}: {one.reason}", condition=condition)
        if question.restated is None:
            value = one.distance
        elif one.outcome == "start" or one.worst is None:
            value = one.start / one.start_allowed
        else:
            value = one.worst.share
        yield QuestionValue(
            interval=Interval(value, value, value, 1), place=f"{one.b} against {one.a} ({one.reason})"
        )


def compare(question: Question, found: Sequence[QuestionValue]) -> ValueComparison:
    """Take the worst curve, whose envelope is its limit, for all; values are held as invariants."""
    if question.terms.metrics[question.claim.metric].series is None:
        return invariant.compare(question, found)
    if question.restated:
        return held_to_reference(question, found)
    worst = held_within(question.claim, question.record, points(question))[0]
    interval = Interval(worst.distance, worst.distance, worst.distance, 1)
    standing: Standing = "holds" if worst.outcome == "inside" else "fails"
    return ValueComparison(standing, f"{worst.b} against {worst.a}: {worst.reason}", interval)
