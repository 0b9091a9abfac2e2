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
    curves = [
        _curve(point.id, "measured", place, values, f"last {metric} {values[-1]:.4f}")
        for place, point in enumerate(points)
        if (values := values_of(point, metric))
    ]
    return _over_steps(metric, title, label, curves, note)


def parity_charts(
    found: Parity, a: ControlledCurve, b: ControlledCurve, *, metric: str, label: str
) -> tuple[LineChart, ...]:
    """Return for each window, the whole curve and its first steps, both curves and their difference.

    Args:
        label: of the vertical axis, with unit.
    """
    windows = {window.name: window for window in found.windows}
    sizes = {name: window.steps for name, window in windows.items()}
    sizes = sizes or {"whole curve": min(len(a.values), len(b.values))}
    if len(set(sizes.values())) < len(sizes):
        sizes = dict(list(sizes.items())[:1])
    charts = []
    for name, steps in sizes.items():
        stem, title = f"{metric}-parity-{steps}", f"{b.name} over {a.name}, {name}"
        both = [_curve(one.name, "measured", place, one.values[:steps]) for place, one in enumerate((a, b))]
        controls = [_relative(one.values, other, steps) for one in (a, b) for other in one.controls]
        apart = [_curve(f"{b.name} against {a.name}", "measured", 0, _relative(a.values, b.values, steps))]
        if controls:
            farthest = [max(values) for values in zip(*controls, strict=True)]
            words = f"the farthest of {plural(len(controls), 'control run')}"
            apart.append(_curve(words, "baseline", 0, farthest))
        limit = windows[name].envelope if name in windows else None
        line = "The line is the envelope: a further control run stays below it 999 times of 1000."
        charts.append(_over_steps(stem, title, label, both))
        charts.append(
            _over_steps(
                f"{stem}-apart",
                f"How far they are apart, {name}",
                "relative difference",
                apart,
                "A control run is the same run with samples and features summed in another order.",
                *([line] if limit else []),
                "Steps with equal values are left out.",
                limit=limit,
            )
        )
    return tuple(charts)


def _over_steps(
    name: str, title: str, label: str, curves: Sequence[Curve], *notes: str, limit: float | None = None
) -> LineChart:
    return LineChart(
        name=name,
        title=title,
        x_label="step",
        x_scale="linear",
        y_label=label,
        y_scale="log10" if label == "relative difference" else "linear",
        curves=tuple(curves),
        limit=limit,
        notes=notes,
    )


def _relative(a: Sequence[float], b: Sequence[float], steps: int) -> list[float]:
    return [abs(one - other) / max(abs(one), 1e-12) for one, other in zip(a[:steps], b[:steps], strict=True)]


def _curve(label: str, kind: CurveKind, place: int, values: Sequence[float], detail: str = "") -> Curve:
    """Return a curve with a spot for each step whose value is a number above 0."""
    shown = ((step, value) for step, value in enumerate(values, 1) if math.isfinite(value) and value > 0)
    spots = tuple(Spot(x=step, value=value, low=value, high=value) for step, value in shown)
    return Curve(label=label, kind=kind, place=place, spots=spots, detail=detail)
