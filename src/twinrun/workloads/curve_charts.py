"""Pictures of curves: those of all points over each other, and two beside their control runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from twinrun.foundation.text import plural
from twinrun.workloads.curve_distance import Parity, largest_difference, same_order, values_of
from twinrun.workloads.tables_and_charts import Curve, CurveKind, LineChart, curve, exact
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
    notes = (note,)
    return LineChart(
        name=metric, title=title, x_label="step", y_label=label, curves=tuple(curves), notes=notes
    )


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
    charts = []
    # Windows of the same steps are one.
    for steps, name in reversed({size: name for name, size in reversed(sizes.items())}.items()):
        both = [_curve(one.name, "measured", place, one.values[:steps]) for place, one in enumerate((a, b))]
        apart = [_curve(f"{b.name} against {a.name}", "measured", 0, _relative(a.values, b.values, steps))]
        controls = [_relative(one.values, other, steps) for one in (a, b) for other in one.controls]
        if controls:
            farthest = [max(values) for values in zip(*controls, strict=True)]
            words = f"the farthest of {plural(len(controls), 'control run')}"
            apart.append(_curve(words, "baseline", 0, farthest))
        limit = windows[name].envelope if name in windows else None
        line = "The line is the envelope: a further control run stays below it 999 times of 1000."
        named, title = f"{metric}-parity-{steps}", f"{b.name} over {a.name}, {name}"
        charts.append(LineChart(name=named, title=title, x_label="step", y_label=label, curves=tuple(both)))
        charts.append(
            LineChart(
                name=f"{named}-apart",
                title=f"How far they are apart, {name}",
                x_label="step",
                y_label="relative difference",
                y_scale="log10",
                curves=tuple(apart),
                limit=limit,
                notes=(
                    "A control run is the same run with samples and features summed in another order.",
                    *((line,) if limit else ()),
                    "Steps with equal values are left out.",
                ),
            )
        )
    return tuple(charts)


def _relative(a: Sequence[float], b: Sequence[float], steps: int) -> list[float]:
    return [abs(one - other) / max(abs(one), 1e-12) for one, other in zip(a[:steps], b[:steps], strict=True)]


def _curve(label: str, kind: CurveKind, place: int, values: Sequence[float], detail: str = "") -> Curve:
    """Return a curve with a spot for each step whose value is a number above 0."""
    shown = ((step, value) for step, value in enumerate(values, 1) if math.isfinite(value) and value > 0)
    return curve(label, kind, place, (exact(step, value) for step, value in shown), detail)
