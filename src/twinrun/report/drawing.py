"""Charts to pictures: bars and rooflines here, curves in a module of their own."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes

from twinrun.foundation.text import number
from twinrun.report.line_chart import draw_lines
from twinrun.report.svg import COLOURS, SIGNS, Key, Picture, canvas, label_logarithmic, svg_text
from twinrun.workloads.tables_and_charts import BarChart, BarKind, Chart, RooflineChart, RooflineSpot

BAR_COLOURS: dict[BarKind, str] = {
    "published": "published",
    "measured": "series-1",
    "baseline": "baseline",
    "bound": "reference",
    "reference": "series-6",
    "predicted": "grid",
}
BAR_NAMES: dict[BarKind, str] = {
    "published": "published",
    "measured": "measured",
    "baseline": "baseline, in the same process",
    "bound": "bound by the measured peak rates",
    "reference": "published elsewhere",
    "predicted": "predicted, with its interval",
}
INCHES_A_LINE, INCHES_AROUND = 0.22, 0.7
LABEL_LETTERS = 26
TERA = 1e12
# By field of a spot: its colour, and what it is called; the first is drawn first.
RATES = {
    "bound": ("reference", "the most this call could reach"),
    "baseline": ("baseline", "the baseline, in the same process"),
    "ours": ("series-1", "this recipe's kernels"),
}


def draw(chart: Chart) -> Picture:
    """Draw a chart of any kind."""
    # Any: each function takes the chart of its key.
    drawings: dict[str, Callable[[Any], Picture]] = {
        "lines": draw_lines,
        "bars": draw_bars,
        "roofline": draw_roofline,
    }
    return drawings[chart.chart](chart)


def draw_bars(chart: BarChart) -> Picture:
    """Draw a chart of bars."""
    labels = ["\n".join(textwrap.wrap(bar.label, LABEL_LETTERS)) for bar in chart.bars]
    lines = sum(1.4 + label.count("\n") for label in labels)
    with canvas(height=INCHES_AROUND + INCHES_A_LINE * lines) as (figure, axes):
        _draw_on(axes, chart, labels)
        values = "; ".join(f"{bar.kind} {bar.label}: {number(bar.value)}" for bar in chart.bars)
        about = f"{chart.unit}, {chart.better} is better. {values}."
        svg = svg_text(figure, name=chart.name, title=chart.title, description=about)
    better = f"{chart.better.capitalize()} is better."
    return Picture(svg=svg, title=chart.title, keys=_bar_keys(chart), notes=(better, *chart.notes))


def _draw_on(axes: Axes, chart: BarChart, labels: list[str]) -> None:
    places, end = range(len(chart.bars)), max((bar.high for bar in chart.bars), default=0) or 1.0
    colours = [COLOURS[BAR_COLOURS[bar.kind]] for bar in chart.bars]
    axes.barh(places, [bar.value for bar in chart.bars], height=0.72, color=colours)
    for place, bar in zip(places, chart.bars, strict=True):
        if bar.high > bar.low:
            axes.plot([bar.low, bar.high], [place, place], color=COLOURS["ink"], linewidth=1)
        axes.text(bar.high + 0.015 * end, place, number(bar.value), va="center", fontsize=9)
    axes.set_yticks(list(places), labels, fontsize=9)
    axes.set_ylim(len(chart.bars) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, end * 1.16)
    axes.set_xlabel(chart.unit)


def _bar_keys(chart: BarChart) -> tuple[Key, ...]:
    details = {
        kind: dict.fromkeys(bar.detail for bar in chart.bars if bar.kind == kind and bar.detail)
        for kind in dict.fromkeys(bar.kind for bar in chart.bars)
    }
    return tuple(
        Key(sign="■", colour=BAR_COLOURS[kind], label=BAR_NAMES[kind], detail="; ".join(found))
        for kind, found in details.items()
    )


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
    return Picture(svg=svg, title=chart.title, keys=_roofline_keys(chart, marks), notes=chart.notes)


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


def _roofline_keys(chart: RooflineChart, marks: dict[str, str]) -> tuple[Key, ...]:
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
