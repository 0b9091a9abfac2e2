"""Pictures of loss curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from twinrun.judge import largest_difference
from twinrun.record import PointRecord, Record
from twinrun.report.svg import (
    COLOURS,
    SIGNS,
    Key,
    Picture,
    canvas,
    label_logarithmic,
    series_colour,
    series_mark,
    svg_text,
)


def curves(record: Record, *, name: str, title: str) -> Picture:
    """Draw the loss curves of all points over each other."""
    points = [point for point in record.points if point.losses]
    note = distance_in_words(points)
    with canvas() as (figure, axes):
        for place, point in enumerate(points):
            steps = range(1, len(point.losses) + 1)
            # Curves that coincide hide each other, so their marks take turns.
            stride = max(len(points), len(steps) // 8)
            look: dict[str, Any] = {"color": COLOURS[series_colour(place)], "marker": series_mark(place)}
            axes.plot(steps, point.losses, markevery=(place * stride // len(points), stride), **look)
        axes.set(xlabel="optimizer step", ylabel="loss, nats/token")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        svg = svg_text(figure, name=name, title=title, description=note)
    keys = tuple(
        Key(
            sign=SIGNS[series_mark(place)],
            colour=series_colour(place),
            label=point.id,
            detail=f"last loss {point.losses[-1]:.4f}",
        )
        for place, point in enumerate(points)
    )
    return Picture(svg=svg, title=title, keys=keys, notes=(note,))


def distances(record: Record, *, tolerance: float, name: str, title: str) -> Picture | None:
    """Draw how far the curves are apart at each step; None where they need not or do not differ."""
    steps = list(zip(*(point.losses for point in record.points), strict=False))
    apart = [largest_difference([(loss,) for loss in step])[0] for step in steps]
    if len({point.order_hash for point in record.points}) > 1 or not any(value > 0 for value in apart):
        return None
    note = "Relative distance between the lowest and the highest loss of each step, over all points."
    with canvas() as (figure, axes):
        # A logarithmic axis has no zero: steps with equal losses are gaps.
        shown = [value or math.nan for value in apart]
        axes.plot(range(1, len(shown) + 1), shown, color=COLOURS["series-1"], marker="o", markersize=3)
        axes.axhline(tolerance, color=COLOURS["published"], linestyle="--", linewidth=1.5)
        axes.set(yscale="log", xlabel="optimizer step", ylabel="relative difference of losses")
        axes.set_xlim(0.5, len(shown) + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        label_logarithmic(axes.yaxis)
        svg = svg_text(figure, name=name, title=title, description=distance_in_words(record.points))
    keys = (
        Key(sign="●", colour="series-1", label="measured"),
        Key(sign="╌", colour="published", label=f"allowed: {tolerance:g}"),
    )
    return Picture(svg=svg, title=title, keys=keys, notes=(note,))


def distance_in_words(points: Sequence[PointRecord]) -> str:
    """Name the largest relative difference between the loss curves of `points`."""
    if len(points) < 2:
        return "One point, so there is no second curve to compare with."
    if len({point.order_hash for point in points}) > 1:
        return "The points did not train on the same batches in the same order: the curves need not coincide."
    value, step = largest_difference([point.losses for point in points])
    if math.isnan(value):
        return f"A curve ends, or is not a finite number, at step {step}."
    found = f"largest relative difference {value:.2g}, at step {step}" if value else "the losses are equal"
    return f"Same batches in the same order at every point; {found}."
