"""Claims between records: a ratio, or a mean of ratios, of two GPUs or of two stacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from twinrun.manifests.claims import ClaimSide, RecordClaim, SideSetting
from twinrun.manifests.metrics import reason_for
from twinrun.protocol.measurements import Measurement, Per
from twinrun.results.configuration import lacks, neutral_for
from twinrun.results.evidence import counted, doubt_of, found_of
from twinrun.results.interval import mean, quotient
from twinrun.results.kinds.comparison import ValueComparison, distance
from twinrun.results.question import QuestionValue, RecordQuestion, points_called
from twinrun.results.record import Record, hardware
from twinrun.results.verdicts import NotAskedError
from twinrun.workloads.workload import PointRecord

# A mean needs at least two common settings, unless the claim has a single one.
LEAST_SETTINGS = 2


class SidePoint(NamedTuple):
    """The point that one record gives to a side."""

    record: Record
    point: PointRecord


# The points of a side, by the setting that the mean is over, or by the point.
Side = dict[str, SidePoint]


def points(question: RecordQuestion) -> tuple[Side, Side]:
    """Return both sides over the settings that they have in common; raises NotAskedError."""
    claim = question.claim
    over, under = (_side(question, side) for side in (claim.over, claim.under))
    common = [name for name in claim.values if name in over and name in under]
    if lack := lacking(question, common):
        raise NotAskedError(lack, condition="points")
    return {name: over[name] for name in common}, {name: under[name] for name in common}


def lacking(question: RecordQuestion, common: Sequence[str]) -> str:
    """Return that the sides have fewer settings in common than make a mean, empty where they have enough."""
    values = question.claim.values
    least = len(values) if question.published else min(LEAST_SETTINGS, len(values))
    if len(common) >= least:
        return ""
    shared = ", ".join(common) or "none"
    return f"the sides have {question.claim.setting} {shared} in common, and {least} make a mean"


def values(question: RecordQuestion, sides: tuple[Side, Side]) -> Iterator[QuestionValue]:
    """Yield the ratio of both sides for each setting; raises NotAskedError."""
    over, under = sides
    for name in over:
        pairs = [_measured(question, side[name]) for side in (over, under)]
        found = [
            counted(point, one, question.metric, side[name].record.gpu, per=_per(question, one))
            for side, (point, one) in zip(sides, pairs, strict=True)
        ]
        yield QuestionValue(interval=quotient(*found), place=name, behind=tuple(pairs))


def compare(question: RecordQuestion, found: Sequence[QuestionValue]) -> ValueComparison:
    """Hold the mean of the ratios against the published one."""
    whole = mean([one.interval for one in found])
    each = ", ".join(f"{one.place} {one.interval.value:.3f}" for one in found)
    place = f"the mean of {each}" if question.claim.setting else each
    return ValueComparison(question.limits.standing(whole), distance(question, whole), whole, place)


def _measured(question: RecordQuestion, side: SidePoint) -> tuple[PointRecord, Measurement]:
    record, point = side
    one = found_of(question.asked, point, question.claim.formula)
    place = f"{record.run} at {point.id}"
    if one is None:
        raise NotAskedError(f"{place} has no {question.asked.measurement or question.metric.id}")
    if doubt := doubt_of([(point, one)], question.terms.metrics, per=_per(question, one)):
        raise NotAskedError(f"{place}: {doubt}")
    return point, one


def _per(question: RecordQuestion, one: Measurement) -> Per:
    return question.claim.per if question.published else one.per


def _side(question: RecordQuestion, side: ClaimSide) -> Side:
    """Return what a side has by setting; raises NotAskedError where that is of no one machine."""
    claim, terms = question.claim, question.terms
    vendor = terms.gpus[side.gpu].vendor
    name_of = str(side) if question.published else f"a {vendor} GPU"
    found: Side = {}
    for record in question.records:
        point = _point(question, side, record)
        if point is None or not _is_of(question, side, record):
            continue
        if lacks(record, point, _told_by(question, side)):
            continue
        name = question.value_of(record, point)
        if name in found:
            raise NotAskedError(f"more than one record of {name_of}{_for(claim, [name])}", condition="points")
        if name in claim.values:
            found[name] = SidePoint(record, point)
    absent = [name for name in claim.values if name not in found]
    if not found or (question.published and absent):
        place = side.point or claim.point
        lack = f"no record at {place} of {name_of}{_for(claim, absent)}"
        raise NotAskedError(f"{lack}{_nowhere(question, side)}", condition="hardware")
    if (
        len(machines := sorted({hardware(one.record) for one in found.values()})) > 1
        and not question.published
    ):
        why = f"the records of {vendor} are of several machines: {', '.join(machines)}"
        raise NotAskedError(why, condition="hardware")
    return found


def _is_of(question: RecordQuestion, side: ClaimSide, record: Record) -> bool:
    """Say whether a record is of a side: of its GPU and stack, or restated of a GPU of its vendor."""
    if record.gpu is None:
        return False
    if question.published:
        return record.gpu.id == side.gpu and side.stack in (None, record.plan.stack)
    return record.plan.vendor == question.terms.gpus[side.gpu].vendor


def _told_by(question: RecordQuestion, side: ClaimSide) -> dict[str, SideSetting]:
    """Return the settings that a record must have to be of a side: those that are not neutral."""
    terms = question.terms
    here = not question.published
    neutral = neutral_for(question.claim, terms.recipe.published, terms.metrics, here=here)
    return {name: value for name, value in side.settings.items() if reason_for(neutral, name) is None}


def _point(question: RecordQuestion, side: ClaimSide, record: Record) -> PointRecord | None:
    """Return the point that has the claim's measurement; restated, one named by its size is the largest."""
    claim = question.claim
    if not question.published and not claim.measurement:
        return max(record.points, key=lambda one: one.devices, default=None)
    found = points_called(side.point or claim.point, record, None, question.terms)
    return max(found, key=lambda one: one.devices, default=None)


def _nowhere(question: RecordQuestion, side: ClaimSide) -> str:
    """Return why no record can be of the stack of a side; nothing where this project has the stack."""
    why = question.terms.recipe.published.nowhere.get(side.stack or "") if question.published else None
    return f", and there can be none: {why}" if why else ""


def _for(claim: RecordClaim, names: Sequence[str]) -> str:
    """Return the words that say which records of a side are meant; none where a side has one."""
    return f" for {claim.setting} {', '.join(names)}" if claim.setting else ""
