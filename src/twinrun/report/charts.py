"""Charts to pictures: curves, and rows of marks. What was published, measured and predicted is told
apart by the shape of its mark as well as by its colour."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from twinrun.foundation.text import number, percent
from twinrun.report.picture import COLOURS, HEIGHT, SERIES, Key, Picture, canvas, label_logarithmic, svg_text
from twinrun.workloads.tables_and_charts import (
    Chart,
    Curve,
    CurveKind,
    LineChart,
    Mark,
    MarkKind,
    Row,
    RowChart,
)

# Marks of matplotlib, and the characters that stand for them in text.
SIGNS = dict(zip("o^svp>h<*XPdHDx+14|_", "●▲■▼⬟▶⬢◀★✖✚♦⬣◆✕⊹⅄≻┃━", strict=True))
HOLLOW = "○"
# By kind of a curve: its colour, its marks and its line. No mark belongs to two kinds. The marks of measured
# curves and their colours, of which each has another one, are coprime in number, so that the two together
# repeat after 72 curves only.
LOOKS: dict[CurveKind, tuple[str, str, str]] = {
    "measured": ("", "o^sv>P<X*", "-"),
    "published": ("published", "Dh", "--"),
    "reference": ("reference", "dpx+14", ":"),
    "baseline": ("baseline", "H", "-."),
    "bound": ("ink", "_", "--"),
}
# By kind of a mark in a row: its colour, its shape, and what it is called.
MARKS: dict[MarkKind, tuple[str, str, str]] = {
    "published": ("published", "D", "published"),
    "measured": ("measured", "o", "measured here"),
    "predicted": ("predicted", "o", "predicted, with its interval"),
    "baseline": ("baseline", "s", "baseline, in the same process"),
    "bound": ("ink", "|", "bound by the measured peak rates"),
    "reference": ("reference", "d", "published elsewhere"),
}
# A curve of more spots has a mark at some of them only.
MAX_MARKS = 12
BINARY = ("", "Ki", "Mi", "Gi", "Ti")
VALUES: dict[str, Callable[[float], str]] = {"share": percent, "relative": "{:.3f}".format}
TICKS: dict[str, Callable[[float], str]] = {"share": "{:.0%}".format, "relative": "{:.2f}".format}
# Letters in a line of a row's label, and the inches that a line and what is around the rows take.
LABEL_LETTERS, INCHES_A_LINE, INCHES_AROUND = 30, 0.2, 0.75


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def sign_of(kind: MarkKind) -> str:
    """Return the character that stands for the mark of a kind in text."""
    return HOLLOW if kind == "predicted" else SIGNS[MARKS[kind][1]]


def draw(chart: Chart) -> Picture:
    """Draw a chart of either kind."""
    return draw_lines(chart) if isinstance(chart, LineChart) else _draw_rows(chart)


def _draw_rows(chart: RowChart) -> Picture:
    """Draw a line for each row, with its values at the end."""
    labels = [textwrap.fill(row.label, LABEL_LETTERS) for row in chart.rows]
    lines = sum(1.3 + label.count("\n") for label in labels)
    marks = [one for row in chart.rows for one in row.marks]
    ends = [0.0, *(one.high for one in marks)] if chart.ticks is None else list(chart.ticks)
    low, high = min(ends), max(ends) or 1.0
    with canvas(height=INCHES_AROUND + INCHES_A_LINE * lines) as (figure, axes):
        for place, row in enumerate(chart.rows):
            # What is known lies over what is predicted.
            for one in sorted(row.marks, key=lambda mark: mark.kind != "predicted"):
                _draw_mark(axes, one, place, low, high)
            axes.text(
                1.02, place, _end_of(row), va="center", fontsize=9, transform=axes.get_yaxis_transform()
            )
        axes.set_yticks(range(len(chart.rows)), labels, fontsize=9)
        axes.set_ylim(len(chart.rows) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=9)
        axes.set_xlabel(chart.x_label, fontsize=10)
        if chart.ticks is not None:
            axes.set_xscale("log")
            axes.set_xticks(list(chart.ticks), list(chart.ticks.values()))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(low, high if chart.ticks else high * 1.04)
        handles = [_mark_of(kind) for kind in MARKS if any(one.kind == kind for one in marks)]
        figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False, fontsize=9)
        about = f"{chart.x_label}. {'; '.join(map(_said, chart.rows))}."
        svg = svg_text(figure, name=chart.name, title=chart.title, description=about)
    keys = [
        Key(sign=sign_of(kind), colour=colour, label=label, detail="; ".join(found))
        for kind, (colour, _, label) in MARKS.items()
        if (found := dict.fromkeys(one.detail for one in marks if one.kind == kind and one.detail))
    ]
    return Picture(svg=svg, title=chart.title, keys=tuple(keys), notes=chart.notes)


def _end_of(row: Row) -> str:
    """Return what stands at the end of a row."""
    signs = [f"{sign_of(one.kind)} " for one in row.marks] if len(row.marks) > 1 else [""]
    values = "  ".join(f"{sign}{_short(one.value)}" for sign, one in zip(signs, row.marks, strict=False))
    return values if row.said is None else row.said


def _said(row: Row) -> str:
    marks = (f"{one.kind} {number(one.value)}" for one in row.marks)
    return f"{row.label}: {', '.join([*marks, *([row.said] if row.said else [])])}"


def _draw_mark(axes: Axes, one: Mark, place: int, low: float, high: float) -> None:
    value, start, end = (min(max(x, low), high) for x in (one.value, one.low, one.high))
    mark = _mark_of(one.kind)
    if end > start:
        axes.hlines(place, start, end, color=mark.get_color(), linewidth=2, alpha=0.6)
    mark.set_data([value], [place])
    axes.add_line(mark)


def _mark_of(kind: MarkKind) -> Line2D:
    colour, mark, label = MARKS[kind]
    face = COLOURS["paper" if kind == "predicted" else colour]
    look = {"color": COLOURS[colour], "markerfacecolor": face, "markersize": 6.5, "linestyle": ""}
    return Line2D([], [], marker=mark, label=label, clip_on=False, **look)  # type: ignore[arg-type]


class Look(NamedTuple):
    """How a curve is drawn."""

    colour: str
    """CSS variable of the page, without its dashes."""
    mark: str
    """Marker of matplotlib."""
    line: str


def look_of(kind: CurveKind, place: int) -> Look:
    """Return the look of the curve at `place` among those of its kind."""
    colour, marks, line = LOOKS[kind]
    return Look(colour or f"series-{place % SERIES + 1}", marks[place % len(marks)], line)


def draw_lines(chart: LineChart) -> Picture:
    """Draw a chart of curves."""
    looks = [look_of(curve.kind, curve.place) for curve in chart.curves]
    with canvas(height=HEIGHT) as (figure, axes):
        for curve, look in zip(chart.curves, looks, strict=True):
            _draw_curve(axes, curve, look, chart.y_scale)
        if chart.limit is not None:
            axes.axhline(chart.limit, color=COLOURS["limit"], linestyle="--")
        _x_axis(axes, chart)
        _y_axis(axes, chart)
        svg = svg_text(figure, name=chart.name, title=chart.title, description=_described(chart))
    keys = [
        Key(sign=SIGNS[look.mark], colour=look.colour, label=curve.label, detail=curve.detail)
        for curve, look in zip(chart.curves, looks, strict=True)
    ]
    if chart.limit is not None:
        keys.append(Key(sign="╌", colour="limit", label=f"limit: {number(chart.limit)}"))
    return Picture(svg=svg, title=chart.title, keys=tuple(keys), notes=chart.notes)


def _draw_curve(axes: Axes, curve: Curve, look: Look, y_scale: str) -> None:
    # A gap for what has no place on the axis: a logarithmic one has no zero.
    values = [math.nan if y_scale == "log10" and one.value <= 0 else one.value for one in curve.spots]
    below = [spot.value - spot.low for spot in curve.spots]
    above = [spot.high - spot.value for spot in curve.spots]
    axes.errorbar(
        [spot.x for spot in curve.spots],
        values,
        yerr=(below, above) if any(value > 0 for value in below + above) else None,
        color=COLOURS[look.colour],
        marker=look.mark,
        markevery=max(1, len(values) // MAX_MARKS),
        linestyle=look.line,
        capsize=3,
        alpha=0.85,
    )


def _x_axis(axes: Axes, chart: LineChart) -> None:
    places = {spot.x for curve in chart.curves for spot in curve.spots if math.isfinite(spot.x)} or {1.0}
    axes.set_xlabel(chart.x_label)
    if chart.x_scale == "log2":
        lowest, highest = math.floor(math.log2(min(places))), math.ceil(math.log2(max(places)))
        axes.set_xscale("log", base=2)
        axes.set_xlim(2 ** (lowest - 0.5), 2 ** (highest + 0.5))
        stride = 1 + (highest - lowest) // 8
        axes.xaxis.set_major_locator(FixedLocator([2.0**one for one in range(lowest, highest + 1, stride)]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _binary(value)))
    elif chart.x_scale == "log10":
        axes.set_xscale("log")
        label_logarithmic(axes.xaxis)
    elif all(place == int(place) for place in places):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _binary(value: float) -> str:
    """Return a power of two, in units of 1024 where it is a large one."""
    power = min(max(int(math.log2(value)) // 10, 0), len(BINARY) - 1) if value >= 1 << 13 else 0
    return f"{value / 1024**power:.4g}{BINARY[power]}"


def _y_axis(axes: Axes, chart: LineChart) -> None:
    axes.set_ylabel(chart.y_label)
    ends = [end for curve in chart.curves for spot in curve.spots for end in (spot.low, spot.high)]
    # Two curves that are equal bit for bit differ by zero, which a logarithmic axis has no place for.
    if chart.y_scale == "log10" and any(end > 0 for end in ends):
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(low, max(high, 2 * (chart.limit or 0)))
        label_logarithmic(axes.yaxis)
        return
    finite = [end for end in ends if math.isfinite(end)] or [1.0]
    if chart.y_scale == "relative":
        low, high = min(0.9, *finite), max(1.0, *finite)
        axes.set_ylim(low - 0.2 * (high - low), high + 0.15 * (high - low))
        axes.axhline(1.0, color=COLOURS["ink"], linewidth=0.8, zorder=0.9)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    elif chart.y_scale != "linear":
        axes.set_ylim(0, max(finite) * 1.2 or 1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: TICKS.get(chart.y_scale, number)(value)))


def _described(chart: LineChart) -> str:
    """Name the values of short curves, and the ends of long ones."""
    text = VALUES.get(chart.y_scale, number)
    parts = []
    for curve in chart.curves:
        spots = curve.spots if len(curve.spots) <= MAX_MARKS else (curve.spots[0], curve.spots[-1])
        parts.append(f"{curve.label}: {', '.join(f'{text(one.value)} at {number(one.x)}' for one in spots)}")
    return f"{chart.y_label} over {chart.x_label}. {'; '.join(parts)}."
