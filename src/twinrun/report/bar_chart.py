"""Bars of one quantity: published, measured here, and beside what."""

from __future__ import annotations

import textwrap

from matplotlib.axes import Axes

from twinrun.foundation.text import number
from twinrun.report.svg import COLOURS, Key, Picture, canvas, svg_text
from twinrun.workloads.charts import BarChart, Kind

COLOUR_OF: dict[Kind, str] = {
    "published": "published",
    "measured": "series-1",
    "baseline": "baseline",
    "bound": "reference",
    "reference": "series-6",
}
NAMES: dict[Kind, str] = {
    "published": "published",
    "measured": "measured",
    "baseline": "baseline, in the same process",
    "bound": "bound by the measured peak rates",
    "reference": "published elsewhere",
}
INCHES_A_LINE, INCHES_AROUND = 0.22, 0.7
LABEL_LETTERS = 26


def draw_bars(chart: BarChart) -> Picture:
    """Draw a chart of bars."""
    labels = ["\n".join(textwrap.wrap(bar.label, LABEL_LETTERS)) for bar in chart.bars]
    lines = sum(1.4 + label.count("\n") for label in labels)
    with canvas(height=INCHES_AROUND + INCHES_A_LINE * lines) as (figure, axes):
        _draw(axes, chart, labels)
        values = "; ".join(f"{bar.kind} {bar.label}: {number(bar.value)}" for bar in chart.bars)
        about = f"{chart.unit}, {chart.better} is better. {values}."
        svg = svg_text(figure, name=chart.name, title=chart.title, description=about)
    better = f"{chart.better.capitalize()} is better."
    return Picture(svg=svg, title=chart.title, keys=_keys(chart), notes=(better, *chart.notes))


def _draw(axes: Axes, chart: BarChart, labels: list[str]) -> None:
    places, end = range(len(chart.bars)), max((bar.high for bar in chart.bars), default=0) or 1.0
    colours = [COLOURS[COLOUR_OF[bar.kind]] for bar in chart.bars]
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


def _keys(chart: BarChart) -> tuple[Key, ...]:
    details = {
        kind: dict.fromkeys(bar.detail for bar in chart.bars if bar.kind == kind and bar.detail)
        for kind in dict.fromkeys(bar.kind for bar in chart.bars)
    }
    return tuple(
        Key(sign="■", colour=COLOUR_OF[kind], label=NAMES[kind], detail="; ".join(found))
        for kind, found in details.items()
    )
