"""Claims of one value at one point: 166 TFLOP/s per card on four MI250."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twinrun.results.evidence import counted, doubt_of
from twinrun.results.kinds.comparison import ValueComparison, held_to_reference, named_or_large, names_of
from twinrun.results.question import Question, QuestionValue
from twinrun.results.verdicts import NotAskedError
from twinrun.workloads.workload import PointRecord


def points(question: Question) -> tuple[PointRecord, ...]:
    """Return the claim's own point; restated, and named by its size, all points where it did not run."""
    return named_or_large(question)


def lacking(question: Question, found: Sequence[PointRecord]) -> str:
    """Return which point the run lacks, empty where it has it."""
    if found:
        return ""
    own = f"no point {question.claim.point}; it has {names_of(question.record)}"
    least = question.restated.least_devices if question.restated else 1
    return f"this run has {own}{f', none of {least} devices' if least > 1 else ''}"


def values(question: Question, found: Sequence[PointRecord]) -> Iterator[QuestionValue]:
    """Yield the measurement of each point; raises NotAskedError where one is none of the claim."""
    metric, claim = question.metric, question.claim
    for point in found:
        one = question.measured(point)
        if one is None:
            raise NotAskedError(f"no {question.asked.measurement or metric.id} at {point.id}")
        formula = question.asked.formula or claim.formula
        if formula and one.formula != formula:
            raise NotAskedError(f"{one.id} at {point.id} is counted by {one.formula}, the claim by {formula}")
        per = claim.per if question.restated is None else one.per
        if doubt := doubt_of([(point, one)], question.terms.metrics, per=per):
            raise NotAskedError(f"at {point.id} {doubt}")
        interval = counted(point, one, metric, question.record.gpu, per=per)
        yield QuestionValue(interval=interval, place=point.id, behind=((point, one),))


def compare(question: Question, found: Sequence[QuestionValue]) -> ValueComparison:
    """Hold the worst value against the reference."""
    return held_to_reference(question, found)
