"""Rooflines: what calls reach, under what their device was measured to do at most."""

from __future__ import annotations

import math
from itertools import cycle

from matplotlib.axes import Axes

from twinrun.foundation.text import number
from twinrun.report.svg import COLOURS, SIGNS, Key, Picture, canvas, label_logarithmic, svg_text
from twinrun.workloads.charts import RooflineChart, RooflineSpot

TERA = 1e12
# By field of a spot: its colour, and what it is called; the first is drawn first.
RATES = {
    "bound": ("reference", "the most this call could reach"),
    "baseline": ("baseline", "the baseline, in the same process"),
    "ours": ("series-1", "this recipe's kernels"),
}


def draw_roofline(chart: RooflineChart) -> Picture:
    """Draw calls under the roofs of their device."""
    marks = dict(
        zip(dict.fromkeys(spot.label for spot in chart.spots), cycle(list(SIGNS)[:-1]), strict=False)
    )
    with canvas(height=4.2) as (figure, axes):
        _draw_roofs(axes, chart)
        for spot in chart.spots:
            _draw_spot(axes, spot, marks[spot.label])
        axes.set_xlabel(f"{chart.resource} operations for a byte that must move")
        axes.set_ylabel(f"{chart.resource} operations, T/s")
        svg = svg_text(figure, name=chart.name, title=chart.title, description=_described(chart))
    return Picture(svg=svg, title=chart.title, keys=_keys(chart, marks), notes=chart.notes)


def _draw_roofs(axes: Axes, chart: RooflineChart) -> None:
    """Draw both roofs, the axes a power of two wider than what is in them."""
    copy, peak = chart.copy_rate / TERA, chart.peak_rate / TERA
    ridge = peak / copy
    intensities = [ridge, *(spot.intensity for spot in chart.spots)]
    low, high = 2.0 ** (math.floor(math.log2(min(intensities))) - 1), 2.0 * max(intensities)
    reached = [rate / TERA for spot in chart.spots for rate in (spot.ours, spot.baseline, spot.bound) if rate]
    axes.plot([low, ridge, high], [low * copy, peak, peak], color=COLOURS["ink"])
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_ylim(min([*reached, low * copy]) / 2, max([*reached, peak]) * 2)
    for axis in (axes.xaxis, axes.yaxis):
        label_logarithmic(axis)


def _draw_spot(axes: Axes, spot: RooflineSpot, mark: str) -> None:
    """Draw what a call reaches: the mark names the call, the colour who reached it."""
    for field, (colour, _) in RATES.items():
        rate = getattr(spot, field)
        look = (
            {"marker": "_", "markersize": 13, "markeredgewidth": 2} if field == "bound" else {"marker": mark}
        )
        if rate:
            axes.plot(
                [spot.intensity], [rate / TERA], color=COLOURS[colour], linestyle="", alpha=0.85, **look
            )


def _keys(chart: RooflineChart, marks: dict[str, str]) -> tuple[Key, ...]:
    rates = [
        Key(sign="━" if field == "bound" else "■", colour=colour, label=label)
        for field, (colour, label) in RATES.items()
        if any(getattr(spot, field) for spot in chart.spots)
    ]
    return (*rates, *(Key(sign=SIGNS[mark], colour="ink", label=label) for label, mark in marks.items()))


def _described(chart: RooflineChart) -> str:
    spots = (
        f"{spot.label} at {number(spot.intensity)}: ours {number(spot.ours / TERA)}"
        + (f", baseline {number(spot.baseline / TERA)}" if spot.baseline else "")
        + (f", at most {number(spot.bound / TERA)}" if spot.bound else "")
        for spot in chart.spots
    )
    return f"Trillions of operations a second over operations for a byte. {'; '.join(spots)}."
