"""Two records side by side: what differs, how far each number moved, how far series are apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement, Per
from twinrun.results.factors import SettingChange, changed, conditions
from twinrun.results.record import Record
from twinrun.workloads.parity import largest_difference
from twinrun.workloads.settings import Grade
from twinrun.workloads.workload import PointRecord, Premise

# A sentence names no more reasons than this; the table has all.
MAX_REASONS = 3


class MeasurementPair(Frozen):
    """One measurement in both records."""

    point_a: str
    point_b: str
    measurement: str
    metric: str
    unit: str
    per: Per
    formula: str | None
    a: float
    b: float
    """Medians."""
    gain: float
    """How many times as good B is as A, in the metric's direction."""
    gain_low: float
    gain_high: float
    """What the extremes of the samples allow."""
    within_spread: bool
    """Whether the samples of both have values in common."""


class SeriesDistance(Frozen):
    """Two series held against each other."""

    point_a: str
    point_b: str
    metric: str
    value: float | None
    """The largest relative difference; None where they cannot be compared."""
    step: int | None
    steps: int
    note: str
    """What the distance means, or why there is none."""


class Comparison(Frozen):
    """Two records of one recipe."""

    recipe: str
    run_a: str
    run_b: str
    sha256_a: str
    sha256_b: str
    summary: str
    pairing: str
    """Which points are compared, and why these."""
    pairs: tuple[MeasurementPair, ...]
    series: tuple[SeriesDistance, ...]
    differences: tuple[SettingChange, ...]
    """Largest likely effect on speed first."""


def compare(a: Record, b: Record, project: Project) -> Comparison:
    """Put two records of one recipe side by side.

    Raises:
        InputError: another recipe, another formula, other units, or nothing that both have measured.
    """
    _demand_equal("the records are of different recipes", {a.plan.recipe}, {b.plan.recipe})
    for record in (a, b):
        if not record.points:
            raise InputError("the record has no point", place=record.run)
    points, pairing = _paired(a, b)
    pairs = tuple(pair for one, other in points for pair in _pairs(one, other, project))
    if not pairs:
        raise InputError(
            "nothing was measured in both records",
            place=a.run,
            found=f"points {_names(a)} and {_names(b)}",
            hint="a run at scale smoke checks and does not time",
        )
    first, second = points[-1]
    found = changed(conditions(a, first), conditions(b, second), a.workload.factors)
    return Comparison(
        recipe=a.plan.recipe,
        run_a=a.run,
        run_b=b.run,
        sha256_a=a.sha256,
        sha256_b=b.sha256,
        summary=_summary([pair for pair in pairs if pair.metric == _headline(a, pairs)], found, project),
        pairing=pairing,
        pairs=pairs,
        series=tuple(one for pair in points for one in _series(a, b, *pair)),
        differences=found,
    )


def _demand_equal(message: str, a: set[str], b: set[str]) -> None:
    if a != b:
        raise InputError(
            message,
            found=f"{', '.join(sorted(a))} and {', '.join(sorted(b))}",
            allowed="the same in both records",
            hint="compare records of one recipe that were written by the same version of twinrun",
        )


def _paired(a: Record, b: Record) -> tuple[list[tuple[PointRecord, PointRecord]], str]:
    """Pair the points of the same name, or the largest of each when there are none."""
    pairs = [(one, other) for one in a.points if (other := b.point(one.id))]
    pairs.sort(key=lambda pair: pair[0].devices)
    if pairs:
        return pairs, "those of the same name"
    one, other = (max(record.points, key=lambda point: point.devices) for record in (a, b))
    return [(one, other)], f"none has the same name, so the largest of each: {one.id} of A, {other.id} of B"


def _pairs(one: PointRecord, other: PointRecord, project: Project) -> list[MeasurementPair]:
    both = [(mine, theirs) for mine in one.measurements if (theirs := other.measurement(mine.id))]
    for mine, theirs in both:
        kinds = [f"{found.metric} in {found.unit} per {found.per}" for found in (mine, theirs)]
        _demand_equal("measurements are in different units", {kinds[0]}, {kinds[1]})
        _demand_equal("FLOP are counted by different formulas", {str(mine.formula)}, {str(theirs.formula)})
    return [_pair(one, other, mine, theirs, project) for mine, theirs in both if mine.metric != "peak-rate"]


def _pair(
    one: PointRecord, other: PointRecord, mine: Measurement, theirs: Measurement, project: Project
) -> MeasurementPair:
    higher = project.metrics[mine.metric].better == "higher"
    good, base = (theirs, mine) if higher else (mine, theirs)
    return MeasurementPair(
        point_a=one.id,
        point_b=other.id,
        measurement=mine.id,
        metric=mine.metric,
        unit=mine.unit,
        per=mine.per,
        formula=mine.formula,
        a=mine.median,
        b=theirs.median,
        gain=_over(good.median, base.median),
        gain_low=_over(good.low, base.high),
        gain_high=_over(good.high, base.low),
        within_spread=mine.overlaps(theirs),
    )


def _over(good: float, base: float) -> float:
    return good / base if base else math.inf if good else 1.0


def _series(a: Record, b: Record, one: PointRecord, other: PointRecord) -> Iterable[SeriesDistance]:
    obstacle = _obstacle(a.terms(one).premises, b.terms(other).premises)
    for mine in one.series:
        theirs = other.one_series(mine.metric)
        if theirs is None or not mine.values or not theirs.values:
            continue
        value, step = largest_difference([mine.values, theirs.values])
        ended = (
            f"at step {step} a {mine.metric} is not finite or a curve has ended"
            if math.isnan(value)
            else None
        )
        why = obstacle or ended
        yield SeriesDistance(
            point_a=one.id,
            point_b=other.id,
            metric=mine.metric,
            value=None if why else value,
            step=None if why else step,
            steps=len(mine.values),
            note=f"not comparable: {why}" if why else "same samples in the same order",
        )


def _obstacle(ours: Sequence[Premise], theirs: Sequence[Premise]) -> str | None:
    """Return why series that rest on these premises cannot be held against each other, or None."""
    for one, other in zip(ours, theirs, strict=True):
        changed = [name for name, value in one.values.items() if value != other.values.get(name)]
        if changed:
            return one.otherwise.format(changed=", ".join(changed))
    return None


def _headline(record: Record, pairs: Sequence[MeasurementPair]) -> str:
    """Return the metric that stands for the comparison."""
    measured = {pair.metric for pair in pairs}
    preferred = [*(name for name in record.workload.headline if name != "speedup"), pairs[0].metric]
    return next(name for name in preferred if name in measured)


def _summary(pairs: Sequence[MeasurementPair], found: Sequence[SettingChange], project: Project) -> str:
    """Say which is faster and by how much, over what interval, and what else differs."""
    title = project.metrics[pairs[0].metric].title
    apart = [pair for pair in pairs if not pair.within_spread]
    gains = [pair.gain for pair in pairs]
    ends = min(pair.gain_low for pair in pairs), max(pair.gain_high for pair in pairs)
    middle = statistics.geometric_mean(gains) if min(gains) > 0 else min(gains)
    if not apart:
        head = f"Neither is faster: B is {middle:.2f} times ({ends[0]:.2f} to {ends[1]:.2f}) A in {title}"
        return f"{head} at {_where(pairs)}, within the spread of the samples"
    if middle >= 1:
        head = f"B is faster: {middle:.2f} times ({ends[0]:.2f} to {ends[1]:.2f}) A"
    else:
        low, high = _over(1, ends[1]), _over(1, ends[0])
        head = f"A is faster: {_over(1, middle):.2f} times ({low:.2f} to {high:.2f}) B"
    head += f" in {title} at {_where(pairs)}"
    if len(pairs) > 1:
        head += f", {len(apart)} of which differ by more than their spread"
    strongest = _strongest(found)
    likely = [f"{one.name} {one.a} -> {one.b}" for one in found if one.speed == strongest]
    if not likely or strongest is None:
        return f"{head}; nothing recorded explains it"
    because = "only small things differ" if strongest == "small" else "most likely because"
    return f"{head}; {because}: {'; '.join(likely[:MAX_REASONS])}"


def _where(pairs: Sequence[MeasurementPair]) -> str:
    one = pairs[0]
    if len(pairs) > 1:
        return f"{len(pairs)} measurements"
    return one.point_a if one.point_a == one.point_b else f"{one.point_b} against {one.point_a}"


def _strongest(found: Iterable[SettingChange]) -> Grade | None:
    """Return the highest grade of a likely effect on speed, None when nothing has any."""
    grades: tuple[Grade, ...] = ("large", "some", "small")
    present = {one.speed for one in found}
    return next((grade for grade in grades if grade in present), None)


def _names(record: Record) -> str:
    return ", ".join(point.id for point in record.points)
