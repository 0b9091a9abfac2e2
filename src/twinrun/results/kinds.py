"""Kinds of claims as rows of one table: which points each is about, what they lack, give and show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.manifests.metrics import reason_for
from twinrun.protocol.intervals import Interval, Standing, exactly, mean, quotient
from twinrun.results.bounds import beyond, limit_of
from twinrun.results.configuration import Apart, apart_from, neutral_for
from twinrun.results.judged import hardware
from twinrun.results.parity import held_within
from twinrun.results.question import (
    BETWEEN,
    Located,
    Place,
    Question,
    QuestionKind,
    Value,
    counted,
    kept_per_doubling,
    names_of,
    points_called,
)
from twinrun.results.verdicts import ConditionName, NotAskedError
from twinrun.workloads.curve_distance import CurveOutcome, largest_difference, values_of
from twinrun.workloads.settings import ABSENT

# Condition that a parity lacks which could not be decided.
UNDECIDED: dict[CurveOutcome, ConditionName] = {"other-run": "order", "no-envelope": "samples"}


class Comparison(NamedTuple):
    """What the values say of a question."""

    standing: Standing
    seen: str
    """The values beside the reference, in words."""
    interval: Interval
    """The value that is worst for the claim, in the metric's canonical unit."""
    place: str = ""
    """Where it was found."""


class Kind(NamedTuple):
    """One kind of claim."""

    places: Callable[[Question], list[Place]]
    """Points that the claim is about, as far as they ran; between records raises NotAskedError."""
    lacking: Callable[[Question, Sequence[Place]], str]
    """What the run lacks of them, empty where it has all."""
    values: Callable[[Question, Sequence[Place]], Iterator[Value]]
    """Yield the values; raises NotAskedError."""
    compare: Callable[[Question, Sequence[Value]], Comparison]


def _lacks_named(question: Question) -> str:
    has = names_of(question.record.points)
    return f"needs the points {' and '.join(question.named)}; this run has {has}"


# One value at one point: 166 TFLOP/s per card on four MI250.


def _named_or_large(question: Question) -> list[Place]:
    """Return the claim's own points, else all that are large enough where their sizes alone name them."""
    own = question.own
    if question.named and all(own):
        found = [place for places in own for place in places]
    elif question.restated and question.by_size:
        every = [Place(question.record, point) for point in question.record.points]
        found = sorted(every, key=lambda place: place.point.devices)
    else:
        found = []
    return [place for place in found if place.point.devices >= question.least_devices]


def _lacks_point(question: Question, found: Sequence[Place]) -> str:
    least = question.least_devices
    own = f"no point {question.claim.point}; it has {names_of(question.record.points)}"
    return "" if found else f"this run has {own}{f', none of {least} devices' if least > 1 else ''}"


def _each(question: Question, found: Sequence[Place]) -> Iterator[Value]:
    """Yield the measurement of each point."""
    formula = question.asked.formula or question.claim.formula
    for place in found:
        restated = question.restated is not None
        _, one = question.located(question.asked, place, per=None if restated else question.claim.per)
        if formula and one.formula != formula:
            where = f"{one.id} at {place.point.id}"
            raise NotAskedError(f"{where} is counted by {one.formula}, the claim by {formula}")
        per = one.per if restated else question.claim.per
        yield Value(counted(place, one, question.metric, per=per), place.point.id, ((place, one),))


def _held_to_reference(question: Question, values: Sequence[Value]) -> Comparison:
    """Hold the value that is worst for the claim against its reference: it decides for all."""
    worst = max(values, key=lambda one: _badness(question, one))
    several = f", the worst of {len(values)}" if len(values) > 1 else ""
    seen, standing = _distance(question, worst.interval), question.limits.standing(worst.interval)
    return Comparison(standing, seen, worst.interval, f"{worst.place}{several}")


def _badness(question: Question, value: Value) -> tuple[int, float]:
    """Return what grows as a value gets worse for the claim: first by its interval, then by itself."""
    order: tuple[Standing, ...] = ("holds", "undecided", "fails")
    apart = value.interval.value - question.reference
    worse = {"higher": -apart, "lower": apart, "equal": abs(apart)}[question.better]
    return order.index(question.limits.standing(value.interval)), worse


def _distance(question: Question, found: Interval) -> str:
    """Say how far a value is from the reference, and what is allowed."""
    change = found.value / question.reference - 1 if question.reference else found.value
    side, tolerance = "above" if change >= 0 else "below", question.asked.tolerance
    shown = f"{tolerance:.{1 if question.restated else 0}%}"
    better = question.better
    allowed = f"{shown} apart" if better == "equal" else f"{better} is better, {shown} worse"
    seen = f"{abs(change):.1%} {side} the published value; {allowed} is allowed"
    return f"{seen} because {question.asked.because}"


# A ratio between two points of one run, restated for each doubling of the devices.


def _lacks_sizes(question: Question, found: Sequence[Place]) -> str:
    """Return which points the run lacks; empty where it has them."""
    if question.restated:
        pairs = _doublings(found)
        gap = next((pair for pair in pairs if pair[1].point.devices != 2 * pair[0].point.devices), None)
        if gap and not all(question.own):
            return f"the sizes between {names_of(gap[:1])} and {names_of(gap[1:])} are left out"
        return "" if pairs else "two world sizes are needed and the run has one"
    if len(found) == len(question.named):
        return ""
    return _lacks_named(question)


def _ratios(question: Question, found: Sequence[Place]) -> Iterator[Value]:
    """Yield the ratio of the claim, or what a device keeps from each size to the next, for a doubling."""
    claim = question.claim
    if question.restated:
        for smaller, larger in _doublings(found):
            behind = tuple(question.located(claim, place, per=None) for place in (smaller, larger))
            place = f"{smaller.point.id} to {larger.point.id}"
            yield Value(kept_per_doubling(*behind), place, behind)
        return
    over, under = (question.located(claim, place, per=claim.per) for place in found)
    few, many = sorted((over, under), key=lambda pair: pair[0].point.devices)
    if question.metric.better == "higher" and few[0].point.devices < many[0].point.devices:
        kept = kept_per_doubling(few, many).value
        for scaling in (one for one in question.project.metrics.values() if one.between_points):
            if excess := beyond(kept, scaling, limit_of(scaling, None, per="run")):
                why = f"{scaling.title} is {excess}; {few[0].point.id} is too slow"
                raise NotAskedError(why, condition="bounds")
    sides = [counted(*pair, question.metric, per=claim.per) for pair in (over, under)]
    yield Value(quotient(*sides), f"{over[0].point.id} over {under[0].point.id}", (over, under))


def _doublings(found: Sequence[Place]) -> list[tuple[Place, Place]]:
    """Return each point with the next larger one of its case."""
    # A point's name starts with its case, up to the @: points of two cases are no two sizes of one.
    ordered = sorted(found, key=lambda one: (one.point.id.rpartition("@")[0], one.point.devices))
    cases = [one.point.id.rpartition("@")[0] for one in ordered]
    pairs = zip(pairwise(ordered), pairwise(cases), strict=True)
    return [(a, b) for (a, b), (one, other) in pairs if one == other and b.point.devices > a.point.devices]


# What must hold anywhere: one curve, one order of samples or one value at every point of a run.


def _whole(question: Question) -> list[Place]:
    """Return the points that a parity names, else all whose curve reaches to the end of the run."""
    if question.named:
        return [place for places in question.own for place in places]
    return [Place(question.record, point) for point in question.record.whole]


def _lacks_another(question: Question, found: Sequence[Place]) -> str:
    """Return that there are no two points to hold against each other; a value has its reference at one."""
    if question.named and not all(question.own):
        return _lacks_named(question)
    metric = question.metric
    if len(found) >= (2 if metric.fact or metric.series or question.kind == "parity" else 1):
        return ""
    needed = "two whole curves" if question.kind == "parity" else "two world sizes"
    more = "; `invoke parity A B` holds two records" if question.kind == "parity" else ""
    return f"needs {needed}, this run has {names_of(found)}{more}"


def _distances(question: Question, found: Sequence[Place]) -> Iterator[Value]:
    """Yield the distance of the points in a digest or in a curve, or the value of each."""
    metric = question.metric
    if metric.fact:
        shown = {place.point.id: place.point.digests.get(metric.fact) for place in found}
        if absent := [name for name, value in shown.items() if not value]:
            raise NotAskedError(f"no {metric.fact} of {', '.join(absent)}")
        yield Value(exactly(float(len(set(shown.values())) > 1)), metric.fact)
    elif metric.series:
        curves = [values_of(place.point, metric.id) for place in found]
        if not all(curves):
            raise NotAskedError(f"a point has no {metric.id}; this run has {names_of(found)}")
        value, step = largest_difference(curves)
        yield Value(exactly(value), f"at step {step} of {len(curves[0])}")
    else:
        yield from _each(question, found)


def _held_to_each_other(question: Question, found: Sequence[Value]) -> Comparison:
    """Hold every value against the reference first, and then against each other."""
    metric, tolerance = question.metric, question.asked.tolerance
    worst = max(found, key=lambda one: _badness(question, one))
    standing, value = question.limits.standing(worst.interval), worst.interval.value
    if metric.fact:
        seen = f"the {metric.fact} is {'not ' if value else ''}the same at every point"
    elif metric.series and math.isnan(value):
        standing, seen = "fails", f"the {metric.id} is not a finite number {worst.place}"
    elif metric.series:
        seen = f"largest relative difference {value:.2g} {worst.place}, allowed {tolerance:g}"
    else:
        apart, _ = largest_difference([(one.interval.value,) for one in found])
        standing = "fails" if apart > tolerance else standing
        seen = (
            f"{question.in_unit(value):.4g} at {worst.place} is farthest from the reference"
            f" {question.asked.value:g}, allowed {tolerance:g}; the points are {apart:.2g} apart"
        )
    return Comparison(standing, seen, worst.interval, worst.place)


# Two ways that give one thing: curves inside the envelope of control runs, or values that agree.


def _parities(question: Question, found: Sequence[Place]) -> Iterator[Value]:
    """Yield how far each curve is from the first, restated as part of its envelope; or the value of each."""
    assert isinstance(question.claim, Claim)
    if not question.of_curves:
        yield from _distances(question, found)
        return
    for one in held_within(question.claim, question.record, [place.point for place in found]):
        if condition := UNDECIDED.get(one.outcome):
            raise NotAskedError(f"{one.b} against {one.a}: {one.reason}", condition=condition)
        value = one.distance
        if question.restated:
            worst = None if one.outcome == "start" else one.worst
            value = worst.share if worst else one.start / one.start_allowed
        yield Value(exactly(value), f"{one.b} against {one.a} ({one.reason})")


def _held_to_envelope(question: Question, values: Sequence[Value]) -> Comparison:
    """Take the worst curve, whose envelope is its limit, for all; values are held as invariants."""
    assert isinstance(question.claim, Claim)
    if not question.of_curves:
        return _held_to_each_other(question, values)
    if question.restated:
        return _held_to_reference(question, values)
    points = [place.point for place in _whole(question)]
    worst = held_within(question.claim, question.record, points)[0]
    standing: Standing = "holds" if worst.outcome == "inside" else "fails"
    return Comparison(standing, f"{worst.b} against {worst.a}: {worst.reason}", exactly(worst.distance))


# What a model gets on a task, which belongs to weights, whatever computes it.


def _scored(question: Question) -> list[Place]:
    points = question.record.points
    return [Place(question.record, point) for point in points if question.found_of(question.asked, point)]


def _lacks_score(question: Question, found: Sequence[Place]) -> str:
    return "" if found else f"this run has no {question.metric.id} of {question.asked.measurement}"


# Between records: a ratio, or a mean of ratios, of two GPUs or of two stacks.


def _sides(question: Question) -> list[Place]:
    """Return the points of both sides over the settings that they have in common; raises NotAskedError."""
    claim = question.claim
    assert isinstance(claim, RecordClaim)
    over, under = (_side(question, claim, number) for number in (0, 1))
    common = [name for name in claim.values if name in over and name in under]
    # A mean over settings of two records needs at least two of them, unless the claim has a single one.
    least = len(claim.values) if question.published else min(2, len(claim.values))
    if len(common) < least:
        shared = ", ".join(common) or "none"
        lack = f"the sides have {claim.setting} {shared} in common, and {least} make a mean"
        raise NotAskedError(lack, condition="points")
    return [side[name] for side in (over, under) for name in common]


def _side(question: Question, claim: RecordClaim, number: int) -> dict[str, Place]:
    """Return what a side has by setting; raises NotAskedError where that is of no one machine."""
    side, found = (claim.over, claim.under)[number], dict[str, Place]()
    vendor = question.project.gpus[side.gpu].vendor
    name_of = str(side) if question.published else f"a {vendor} GPU"
    neutral = neutral_for(claim, question.record, here=not question.published)
    told_by = {name: value for name, value in side.settings.items() if reason_for(neutral, name) is None}
    for record in question.records:
        as_published = record.gpu and record.gpu.id == side.gpu and side.stack in (None, record.plan.stack)
        if record.gpu is None or record.plan.vendor != vendor or (question.published and not as_published):
            continue
        named = [place.point for place in points_called(side.point or claim.point, record, None)]
        points = named if question.published or claim.measurement else record.points
        point = max(points, key=lambda one: one.devices, default=None)
        own = record.settings(point) if point else {}
        if point is None or any(own.get(name, ABSENT) != value for name, value in told_by.items()):
            continue
        setting = record.terms(point).settings[claim.setting] if claim.setting else claim.point
        if setting in found:
            which = f" for {claim.setting} {setting}" if claim.setting else ""
            raise NotAskedError(f"more than one record of {name_of}{which}", condition="points")
        if setting in claim.values:
            found[setting] = Place(record, point, number, setting)
    absent = [name for name in claim.values if name not in found]
    if not found or (question.published and absent):
        nowhere = question.recipe.published.nowhere.get(side.stack or "") if question.published else None
        which = f" for {claim.setting} {', '.join(absent)}" if claim.setting else ""
        lack = f"no record at {side.point or claim.point} of {name_of}{which}"
        why = f"{lack}, and there can be none: {nowhere}" if nowhere else lack
        raise NotAskedError(why, condition="hardware")
    machines = sorted({hardware(one.record) for one in found.values()})
    if len(machines) > 1 and not question.published:
        why = f"the records of {vendor} are of several machines: {', '.join(machines)}"
        raise NotAskedError(why, condition="hardware")
    return found


def _between(question: Question, found: Sequence[Place]) -> Iterator[Value]:
    """Yield the ratio of both sides for each setting."""
    for over in (one for one in found if one.side == 0):
        under = next(one for one in found if one.side == 1 and one.setting == over.setting)
        per = question.claim.per if question.published else None
        pairs: tuple[Located, ...] = tuple(
            question.located(question.asked, one, per=per) for one in (over, under)
        )
        sides = [counted(*pair, question.metric, per=per or pair[1].per) for pair in pairs]
        yield Value(quotient(*sides), over.setting, pairs)


def _held_to_mean(question: Question, found: Sequence[Value]) -> Comparison:
    """Hold the mean of the ratios against the published one."""
    whole = mean([one.interval for one in found])
    each = ", ".join(f"{one.place} {one.interval.value:.3f}" for one in found)
    place = f"the mean of {each}" if getattr(question.claim, "setting", None) else each
    return Comparison(question.limits.standing(whole), _distance(question, whole), whole, place)


KINDS: dict[QuestionKind, Kind] = {
    "absolute": Kind(_named_or_large, _lacks_point, _each, _held_to_reference),
    "ratio": Kind(_named_or_large, _lacks_sizes, _ratios, _held_to_reference),
    "invariant": Kind(_whole, _lacks_another, _distances, _held_to_each_other),
    "parity": Kind(_whole, _lacks_another, _parities, _held_to_envelope),
    "score": Kind(_scored, _lacks_score, _each, _held_to_reference),
    BETWEEN: Kind(_sides, lambda *_: "", _between, _held_to_mean),
}


@dataclass(frozen=True, kw_only=True)
class Asked(Question):
    """A question with what its records answer, each found once; raises NotAskedError where there is none."""

    @cached_property
    def places(self) -> list[Place]:
        """Points that it is about, as far as they ran."""
        return KINDS[self.kind].places(self)

    @property
    def pairs(self) -> list[tuple[Place, Place]]:
        """Points of both sides of a claim between records, by their setting."""
        under = {one.setting: one for one in self.places if one.side == 1}
        return [(one, under[one.setting]) for one in self.places if one.side == 0]

    @cached_property
    def apart(self) -> Apart:
        """How its points, or all that were planned, stand to the configuration of the claim."""
        planned = [place.point.planned for place in self.places] or self.record.plan.points
        meant = self.named[0] if self.named and self.places else ""
        return apart_from(self.claim, self.record, planned, meant=meant, here=not self.published)

    @cached_property
    def values(self) -> list[Value]:
        """The values that are held against the reference."""
        try:
            return list(KINDS[self.kind].values(self, self.places))
        except ZeroDivisionError:
            raise NotAskedError("a ratio to 0 is no number") from None

    @cached_property
    def comparison(self) -> Comparison:
        """What the values say."""
        return KINDS[self.kind].compare(self, self.values)
