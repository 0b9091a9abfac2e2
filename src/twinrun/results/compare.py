"""Two records side by side: what differs, how far each number moved, how far series are apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.metrics import Metric
from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement, Per
from twinrun.results.factors import SettingChange, changed, conditions, fields_apart, marks_of
from twinrun.results.judged import Judged
from twinrun.workloads.curve_distance import largest_difference
from twinrun.workloads.settings import Fingerprint, Grade
from twinrun.workloads.workload import MeasuredPoint, Premise

# A sentence names no more reasons than this; the table has all.
MAX_REASONS = 3
# Metrics in which one run is faster than another.
SPEED = {"step-time", "tokens-per-second", "model-flops", "time"}


class Gain(Frozen):
    """How many times as good B is as A, in the metric's direction."""

    times: float
    low: float
    high: float
    """What the extremes of the samples allow."""


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
    gain: Gain | None
    """None where nothing is so many times as good: a loss, and runs of two experiments."""
    difference: float | None
    """B less A, for the metric of a curve."""
    obstacles: tuple[str, ...]
    """Fields of the fingerprint that the metric depends on and in which the runs differ, with both sides."""
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


def compare(a: Judged, b: Judged, project: Project) -> Comparison:
    """Put two records of one recipe side by side.

    Raises:
        InputError: another recipe, another formula, other units, or nothing that both have measured.
    """
    _demand_equal("the records are of different recipes", {a.plan.recipe}, {b.plan.recipe})
    for record in (a, b):
        if not record.points:
            raise InputError("the record has no point", place=record.run)
    points, pairing = _paired(a, b)
    pairs = tuple(
        pair
        for one, other in points
        for pair in _pairs(one, other, project, marks=(marks_of(a, one), marks_of(b, other)))
    )
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
        sha256_a=a.record.sha256,
        sha256_b=b.record.sha256,
        summary=_summary(a, pairs, found, project),
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


def _paired(a: Judged, b: Judged) -> tuple[list[tuple[MeasuredPoint, MeasuredPoint]], str]:
    """Pair the points of the same name, or the largest of each when there are none."""
    pairs = [(one, other) for one in a.points if (other := b.point(one.id))]
    pairs.sort(key=lambda pair: pair[0].devices)
    if pairs:
        return pairs, "those of the same name"
    one, other = (max(record.points, key=lambda point: point.devices) for record in (a, b))
    return [(one, other)], f"none has the same name, so the largest of each: {one.id} of A, {other.id} of B"


def _pairs(
    one: MeasuredPoint, other: MeasuredPoint, project: Project, *, marks: tuple[Fingerprint, Fingerprint]
) -> list[MeasurementPair]:
    both = [(mine, theirs) for mine in one.measurements if (theirs := other.measurement(mine.id))]
    for mine, theirs in both:
        kinds = [f"{found.metric} in {found.unit} per {found.per}" for found in (mine, theirs)]
        _demand_equal("measurements are in different units", {kinds[0]}, {kinds[1]})
        _demand_equal("FLOP are counted by different formulas", {str(mine.formula)}, {str(theirs.formula)})
    kept = [(mine, theirs) for mine, theirs in both if mine.metric != "peak-rate"]
    return [
        _pair(one, other, mine, theirs, metric=project.metrics[mine.metric], marks=marks)
        for mine, theirs in kept
    ]


def _pair(
    one: MeasuredPoint,
    other: MeasuredPoint,
    mine: Measurement,
    theirs: Measurement,
    *,
    metric: Metric,
    marks: tuple[Fingerprint, Fingerprint],
) -> MeasurementPair:
    obstacles = fields_apart(metric, *marks)
    curve = metric.series is not None
    gain = None if obstacles or curve else _gain(mine, theirs, metric)
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
        gain=gain,
        difference=None if obstacles or gain else theirs.median - mine.median,
        obstacles=obstacles,
        within_spread=mine.overlaps(theirs),
    )


def _gain(mine: Measurement, theirs: Measurement, metric: Metric) -> Gain | None:
    """Return how many times as good B is; None where it is a multiple of nothing, as of a score of 0."""
    good, base = (theirs, mine) if metric.better == "higher" else (mine, theirs)
    ends = _over(good.low, base.high), _over(good.high, base.low)
    if math.isinf(ends[1]):
        return None
    return Gain(times=_over(good.median, base.median), low=ends[0], high=ends[1])


def _over(good: float, base: float) -> float:
    return good / base if base else math.inf if good else 1.0


def _series(a: Judged, b: Judged, one: MeasuredPoint, other: MeasuredPoint) -> Iterable[SeriesDistance]:
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


def _summary(
    record: Judged, pairs: Sequence[MeasurementPair], found: Sequence[SettingChange], project: Project
) -> str:
    """Say which is faster and by how much, and most likely why; of two experiments, what may be compared."""
    refused = [pair for pair in pairs if pair.obstacles]
    compared = {pair.metric for pair in pairs if pair.gain}
    if not refused:
        return _faster(record, pairs, found, project)
    titles = ", ".join(dict.fromkeys(project.metrics[pair.metric].title for pair in refused))
    why = max((pair.obstacles for pair in refused), key=len)
    more = f" and {len(why) - MAX_REASONS} more" if len(why) > MAX_REASONS else ""
    note = f"Not compared, because the runs differ in {'; '.join(why[:MAX_REASONS])}{more}: {titles}"
    if not compared:
        return f"Two experiments. {note}"
    if compared.isdisjoint(SPEED) and any(pair.metric in SPEED for pair in refused):
        return f"Two experiments. {note}. {_faster(record, pairs, found, project, better='better')}"
    return f"{_faster(record, pairs, found, project)}. {note}"


def _faster(
    record: Judged,
    pairs: Sequence[MeasurementPair],
    found: Sequence[SettingChange],
    project: Project,
    *,
    better: str = "",
) -> str:
    """Say which side is better in the metric that stands for the comparison, and most likely why."""
    measured = {pair.metric for pair in pairs if pair.gain}
    preferred = [*(name for name in record.workload.headline if name != "speedup"), *sorted(measured)]
    headline = next((name for name in preferred if name in measured), None)
    if headline is None:
        return "Neither is faster: what both measured has no ratio"
    of_metric = [pair for pair in pairs if pair.metric == headline]
    # The call of a baseline is somebody else's: it does not count beside ours.
    chosen = [pair for pair in of_metric if "@" not in pair.measurement] or of_metric
    title = project.metrics[headline].title
    # Times are repeated; scores and losses are not.
    better = better or ("faster" if project.metrics[headline].repeated else "better")
    gains = [pair.gain for pair in chosen if pair.gain]
    apart = [pair for pair in chosen if not pair.within_spread]
    times = [gain.times for gain in gains]
    ends = min(gain.low for gain in gains), max(gain.high for gain in gains)
    middle = statistics.geometric_mean(times) if min(times) > 0 else min(times)
    if not apart:
        head = f"Neither is {better}: B is {middle:.2f} times ({ends[0]:.2f} to {ends[1]:.2f}) A in {title}"
        return f"{head} at {_where(chosen)}, within the spread of the samples"
    if middle >= 1:
        head = f"B is {better}: {middle:.2f} times ({ends[0]:.2f} to {ends[1]:.2f}) A"
    else:
        low, high = _over(1, ends[1]), _over(1, ends[0])
        head = f"A is {better}: {_over(1, middle):.2f} times ({low:.2f} to {high:.2f}) B"
    head += f" in {title} at {_where(chosen)}"
    if len(chosen) > 1:
        head += f", {len(apart)} of which differ by more than their spread"
    return f"{head}{_cause(found)}"


def _cause(found: Sequence[SettingChange]) -> str:
    strongest = _strongest(found)
    likely = [f"{one.name} {one.a} -> {one.b}" for one in found if one.speed == strongest]
    if not likely or strongest is None:
        return "; nothing recorded explains it"
    because = "only small things differ" if strongest == "small" else "most likely because"
    return f"; {because}: {'; '.join(likely[:MAX_REASONS])}"


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


def _names(record: Judged) -> str:
    return ", ".join(point.id for point in record.points)
