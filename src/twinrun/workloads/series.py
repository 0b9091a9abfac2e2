"""Series of several points held against each other: curves, and how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

from twinrun.workloads.charts import Curve, LineChart, Spot
from twinrun.workloads.workload import PointRecord

# A fact that two points share when they worked through the same samples in the same order.
ORDER = "order hash"


def largest_difference(curves: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the largest relative distance between curves and its step, counted from 1.

    The value is nan, at the first such step, where a value is not finite or a curve ends early.
    """
    worst, worst_step = 0.0, 1
    for step in range(1, max(len(curve) for curve in curves) + 1):
        values = [curve[step - 1] if step <= len(curve) else math.nan for curve in curves]
        if not all(math.isfinite(value) for value in values):
            return math.nan, step
        distance = (max(values) - min(values)) / max(abs(min(values)), 1e-12)
        if distance > worst:
            worst, worst_step = distance, step
    return worst, worst_step


def same_order(points: Sequence[PointRecord]) -> bool:
    """Say whether all points worked through the same samples in the same order, as far as they say."""
    return len({point.facts.get(ORDER) for point in points}) <= 1


def values_of(point: PointRecord, metric: str) -> tuple[float, ...]:
    """Return the series of `metric` of a point, empty where it has none."""
    found = point.one_series(metric)
    return found.values if found else ()


def distance_in_words(points: Sequence[PointRecord], metric: str) -> str:
    """Name the largest relative difference between the curves of `points`."""
    if len(points) < 2:
        return "One point, so there is no second curve to compare with."
    if not same_order(points):
        return "The points did not train on the same batches in the same order: the curves need not coincide."
    value, step = largest_difference([values_of(point, metric) for point in points])
    if math.isnan(value):
        return f"A curve ends, or is not a finite number, at step {step}."
    found = f"largest relative difference {value:.2g}, at step {step}" if value else "the curves are equal"
    return f"Same batches in the same order at every point; {found}."


def curves_of(points: Sequence[PointRecord], metric: str, *, title: str, label: str, note: str) -> LineChart:
    """Return the series of all points over each other."""
    return LineChart(
        name=metric,
        title=title,
        x_label="step",
        x_scale="linear",
        y_label=label,
        y_scale="linear",
        curves=tuple(
            Curve(
                label=point.id,
                kind="measured",
                place=place,
                spots=_spots(values_of(point, metric)),
                detail=f"last {metric} {values_of(point, metric)[-1]:.4f}",
            )
            for place, point in enumerate(points)
        ),
        notes=(note,),
    )


def distances(points: Sequence[PointRecord], metric: str, *, limit: float, title: str) -> LineChart:
    """Return how far the series are apart at each step at which they differ."""
    steps = zip(*(values_of(point, metric) for point in points), strict=False)
    apart = [largest_difference([(value,) for value in step])[0] for step in steps]
    note = (
        f"Relative distance between the lowest and the highest {metric} of each step, over all points;"
        " steps with equal values are left out."
    )
    return LineChart(
        name=f"{metric}-distance",
        title=title,
        x_label="step",
        x_scale="linear",
        y_label=f"relative difference of {metric}",
        y_scale="log10",
        curves=(Curve(label="measured", kind="measured", place=0, spots=_spots(apart)),),
        limit=limit,
        notes=(note,),
    )


def _spots(values: Sequence[float]) -> tuple[Spot, ...]:
    """Return a spot for each step whose value is a number above 0."""
    return tuple(
        Spot(x=step, value=value, low=value, high=value)
        for step, value in enumerate(values, 1)
        if math.isfinite(value) and value > 0
    )
