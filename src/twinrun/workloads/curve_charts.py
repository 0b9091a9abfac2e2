"""Pictures of curves: those of all points over each other, and two beside their control runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from twinrun.foundation.text import plural
from twinrun.workloads.curve_distance import Parity, largest_difference, same_order, values_of
from twinrun.workloads.tables_and_charts import Curve, CurveKind, LineChart, Spot
from twinrun.workloads.workload import ControlledCurve, MeasuredPoint


def distance_in_words(points: Sequence[MeasuredPoint], metric: str) -> str:
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


def series_chart(
    points: Sequence[MeasuredPoint], metric: str, *, title: str, label: str, note: str
) -> LineChart:
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


def distances(points: Sequence[MeasuredPoint], metric: str, *, limit: float, title: str) -> LineChart:
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


def parity_charts(
    found: Parity, a: ControlledCurve, b: ControlledCurve, *, metric: str, label: str
) -> tuple[LineChart, ...]:
    """Return for each window, the whole curve and its first steps, both curves and their difference.

    Args:
        label: of the vertical axis, with unit.
    """
    windows = {window.name: window for window in found.windows}
    sizes = {name: window.steps for name, window in windows.items()} or {
        "whole curve": min(len(a.values), len(b.values))
    }
    if len(set(sizes.values())) < len(sizes):
        sizes = dict(list(sizes.items())[:1])
    charts = []
    for name, steps in sizes.items():
        stem = f"{metric}-parity-{steps}"
        charts.append(_both(a, b, steps, name=stem, title=f"{b.name} over {a.name}, {name}", label=label))
        envelope = windows[name].envelope if name in windows else None
        charts.append(_apart(a, b, steps, name=f"{stem}-apart", window=name, limit=envelope))
    return tuple(charts)


def _both(
    a: ControlledCurve, b: ControlledCurve, steps: int, *, name: str, title: str, label: str
) -> LineChart:
    return LineChart(
        name=name,
        title=title,
        x_label="step",
        x_scale="linear",
        y_label=label,
        y_scale="linear",
        curves=tuple(
            _curve(one.name, "measured", place, one.values[:steps]) for place, one in enumerate((a, b))
        ),
    )


def _apart(
    a: ControlledCurve, b: ControlledCurve, steps: int, *, name: str, window: str, limit: float | None
) -> LineChart:
    controls = [(one, control) for one in (a, b) for control in one.controls]
    others = [_relative(one.values, control, steps) for one, control in controls]
    largest = [max(values) for values in zip(*others, strict=True)] if others else []
    curves = [_curve(f"{b.name} against {a.name}", "measured", 0, _relative(a.values, b.values, steps))]
    if largest:
        label = f"the farthest of {plural(len(controls), 'control run')}"
        curves.append(_curve(label, "baseline", 0, largest))
    return LineChart(
        name=name,
        title=f"How far they are apart, {window}",
        x_label="step",
        x_scale="linear",
        y_label="relative difference",
        y_scale="log10",
        curves=tuple(curves),
        limit=limit,
        notes=(
            "A control run is the same run with samples and features summed in another order.",
            *(
                ["The line is the envelope: a further control run stays below it 999 times of 1000."]
                if limit
                else []
            ),
            "Steps with equal values are left out.",
        ),
    )


def _relative(a: Sequence[float], b: Sequence[float], steps: int) -> list[float]:
    return [abs(one - other) / max(abs(one), 1e-12) for one, other in zip(a[:steps], b[:steps], strict=True)]


def _curve(label: str, kind: CurveKind, place: int, values: Sequence[float]) -> Curve:
    return Curve(label=label, kind=kind, place=place, spots=_spots(values))


def _spots(values: Sequence[float]) -> tuple[Spot, ...]:
    """Return a spot for each step whose value is a number above 0."""
    return tuple(
        Spot(x=step, value=value, low=value, high=value)
        for step, value in enumerate(values, 1)
        if math.isfinite(value) and value > 0
    )
