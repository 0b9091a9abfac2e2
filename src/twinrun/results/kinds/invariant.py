"""Claims that must hold anywhere: one curve, one order of samples or one value at every point of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from twinrun.results.evidence import counted, doubt_of, names_of
from twinrun.results.interval import Interval
from twinrun.results.kinds.comparison import ValueComparison, badness
from twinrun.results.question import Question, QuestionValue
from twinrun.results.verdicts import NotAskedError
from twinrun.workloads.curve_distance import largest_difference, values_of
from twinrun.workloads.workload import PointRecord


def points(question: Question) -> tuple[PointRecord, ...]:
    """Return the points whose curve reaches to the end of the run."""
    return question.record.whole


def lacking(question: Question, found: Sequence[PointRecord]) -> str:
    """Return that there are no two points to hold against each other; a value has its reference at one."""
    metric = question.metric
    if len(found) >= (2 if metric.fact or metric.series else 1):
        return ""
    return f"needs two world sizes; this run has {names_of(found) or 'none'}"


def values(question: Question, found: Sequence[PointRecord]) -> Iterator[QuestionValue]:
    """Yield the distance of the points in a fact or in a curve, or the value of each."""
    metric = question.metric
    if metric.fact:
        yield _distance(_of_fact(found, metric.fact), metric.fact)
    elif metric.series:
        curves = [values_of(point, metric.id) for point in found]
        if not all(curves):
            raise NotAskedError(f"a point has no {metric.id}; this run has {names_of(found)}")
        value, step = largest_difference(curves)
        yield _distance(value, f"at step {step} of {len(curves[0])}")
    else:
        for point in found:
            one = question.measured(point)
            if one is None:
                raise NotAskedError(f"no {question.claim.measurement or metric.id} at {point.id}")
            if doubt := doubt_of([(point, one)], question.terms.metrics, per=question.claim.per):
                raise NotAskedError(f"at {point.id} {doubt}")
            interval = counted(point, one, metric, question.record.gpu, per=question.claim.per)
            yield QuestionValue(interval=interval, place=point.id, behind=((point, one),))


def compare(question: Question, found: Sequence[QuestionValue]) -> ValueComparison:
    """Hold every value against the reference first, and then against each other."""
    metric, tolerance = question.metric, question.asked.tolerance
    worst = max(found, key=lambda one: badness(question, one))
    standing, value = question.limits.standing(worst.interval), worst.interval.value
    if metric.fact:
        same = f"the {metric.fact} is {'not ' if value else ''}the same at every point"
        return ValueComparison(standing, same, worst.interval, worst.place)
    if metric.series:
        if math.isnan(value):
            return ValueComparison("fails", f"the {metric.id} is not a finite number {worst.place}")
        seen = f"largest relative difference {value:.2g} {worst.place}, allowed {tolerance:g}"
        return ValueComparison(standing, seen, worst.interval, worst.place)
    apart, _ = largest_difference([(one.interval.value,) for one in found])
    shown = question.in_unit(value)
    seen = (
        f"{shown:.4g} at {worst.place} is farthest from the reference {question.asked.value:g},"
        f" allowed {tolerance:g}; the points are {apart:.2g} apart"
    )
    return ValueComparison("fails" if apart > tolerance else standing, seen, worst.interval, worst.place)


def _of_fact(found: Sequence[PointRecord], fact: str) -> float:
    """Return 0 where all points have one fact, else 1; raises NotAskedError."""
    shown = {point.id: point.facts.get(fact) for point in found}
    if absent := [name for name, value in shown.items() if not value]:
        raise NotAskedError(f"no {fact} of {', '.join(absent)}")
    return float(len(set(shown.values())) > 1)


def _distance(value: float, place: str) -> QuestionValue:
    return QuestionValue(interval=Interval(value, value, value, 1), place=place)
