"""Claims of a ratio between two points of one run, restated for each doubling of the devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from twinrun.results.bounds import beyond
from twinrun.results.evidence import Located, counted, doubt_of, found_of, kept_per_doubling
from twinrun.results.interval import quotient
from twinrun.results.kinds.comparison import ValueComparison, held_to_reference, named_or_large, names_of
from twinrun.results.question import Question, QuestionValue
from twinrun.results.verdicts import NotAskedError
from twinrun.workloads.workload import PointRecord


def points(question: Question) -> tuple[PointRecord, ...]:
    """Return the two points of the claim; restated, and named by their sizes, all where one did not run."""
    return named_or_large(question)


def lacking(question: Question, found: Sequence[PointRecord]) -> str:
    """Return which points the run lacks, and what its own first and last give; empty where it has them."""
    if question.restated:
        return "" if _doublings(found) else "two world sizes are needed and the run has one"
    if len(found) == len(question.named):
        return ""
    reason = f"needs the points {' and '.join(question.named)}; this run has {names_of(question.record)}"
    pairs = _doublings(sorted(question.record.points, key=lambda point: point.devices))
    if not pairs or question.record.gpu is None:
        return reason
    first, last = pairs[0][0], pairs[-1][1]
    under, over = (found_of(question.claim, point) for point in (first, last))
    if not under or not over or under.median <= 0:
        return reason
    return f"{reason}, and from {first.id} to {last.id} it keeps {over.median / under.median:.3f}"


def values(question: Question, found: Sequence[PointRecord]) -> Iterator[QuestionValue]:
    """Yield the ratio of the claim, or what a device keeps from each size to the next, for a doubling."""
    if question.restated:
        for smaller, larger in _doublings(found):
            behind = (_pair(question, smaller), _pair(question, larger))
            place = f"{smaller.id} to {larger.id}"
            yield QuestionValue(interval=kept_per_doubling(*behind), place=place, behind=behind)
        return
    over, under = (_pair(question, point) for point in found)
    metric, gpu, per = question.metric, question.record.gpu, question.claim.per
    sides = [counted(*pair, metric, gpu, per=per) for pair in (over, under)]
    few, many = sorted((over, under), key=lambda pair: pair[0].devices)
    if metric.better == "higher" and few[0].devices < many[0].devices:
        kept = kept_per_doubling(few, many).value
        for scaling in (one for one in question.terms.metrics.values() if one.between_points):
            if excess := beyond(kept, scaling, None, per="run"):
                why = f"{scaling.title} is {excess}; {few[0].id} is too slow"
                raise NotAskedError(why, condition="bounds")
    place = f"{over[0].id} over {under[0].id}"
    yield QuestionValue(interval=quotient(*sides), place=place, behind=(over, under))


def compare(question: Question, found: Sequence[QuestionValue]) -> ValueComparison:
    """Hold the worst ratio against the reference."""
    return held_to_reference(question, found)


def _pair(question: Question, point: PointRecord) -> Located:
    """Return the claim's own measurement of a point; raises NotAskedError."""
    one = found_of(question.claim, point)
    if one is None:
        raise NotAskedError(f"no {question.claim.metric} at {point.id}")
    per = question.claim.per if question.restated is None else None
    if doubt := doubt_of([(point, one)], question.terms.metrics, per=per):
        raise NotAskedError(f"at {point.id} {doubt}")
    return point, one


def _doublings(found: Sequence[PointRecord]) -> list[tuple[PointRecord, PointRecord]]:
    """Return each point with the next larger one of its case."""
    # A point's name starts with its case, up to the @: points of two cases are no two sizes of one.
    ordered = sorted(found, key=lambda point: (point.id.rpartition("@")[0], point.devices))
    pairs = [(a, b) for a, b in pairwise(ordered) if a.id.rpartition("@")[0] == b.id.rpartition("@")[0]]
    return [(a, b) for a, b in pairs if b.devices > a.devices]
