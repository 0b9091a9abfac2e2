"""Curves over one axis, such as scaling and losses, and values written beside their spots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox, ScaledTranslation

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import number, percent
from twinrun.report.svg import (
    COLOURS,
    SIGNS,
    Key,
    Look,
    Picture,
    canvas,
    label_logarithmic,
    lay_out,
    look_of,
    svg_text,
)
from twinrun.workloads.tables_and_charts import Curve, LineChart, Spot

# More values than this are a cloud of numbers, and the table has them.
MAX_LABELS = 12
# A curve of more spots has a mark at some of them only.
MAX_MARKS = 12
BINARY = ("", "Ki", "Mi", "Gi", "Ti")
VALUES: dict[str, Callable[[float], str]] = {"share": percent, "relative": "{:.3f}".format}
TICKS: dict[str, Callable[[float], str]] = {"share": "{:.0%}".format, "relative": "{:.2f}".format}
POINTS = 9
# The width of a letter and the height of a line of sans-serif text, at most, in font sizes.
LETTER, LINE = 0.62, 1.2
# Half the side of the square that a mark covers.
MARK = 4.5
# Points between the marks of curves that share a place on the x axis, and over all of them.
APART, SPREAD = 4.0, 14.0
# Where a label may stand, in the order of preference: share of its width and height, then points on top.
PLACES = (
    (0, 0.5, 0, 7),
    (0, -0.5, 0, -7),
    (0.5, 0, 8, 0),
    (-0.5, 0, -8, 0),
    (0, 0.5, 0, 19),
    (0, -0.5, 0, -19),
)


def draw_lines(chart: LineChart) -> Picture:
    """Draw a chart of curves."""
    looks = [look_of(curve.kind, curve.place) for curve in chart.curves]
    with canvas() as (figure, axes):
        aside = _aside(chart)
        for place, (curve, look) in enumerate(zip(chart.curves, looks, strict=True)):
            _draw(axes, curve, look, turn=(place, len(looks)), y_scale=chart.y_scale, aside=aside[place])
        if chart.limit is not None:
            axes.axhline(chart.limit, color=COLOURS["limit"], linestyle="--")
        _x_axis(axes, chart)
        _y_axis(axes, chart)
        _label(axes, chart, looks)
        svg = svg_text(figure, name=chart.name, title=chart.title, description=_described(chart))
    keys = [
        Key(sign=SIGNS[look.mark], colour=look.colour, label=curve.label, detail=curve.detail)
        for curve, look in zip(chart.curves, looks, strict=True)
    ]
    if chart.limit is not None:
        keys.append(Key(sign="╌", colour="limit", label=f"limit: {number(chart.limit)}"))
    return Picture(svg=svg, title=chart.title, keys=tuple(keys), notes=chart.notes)


def _aside(chart: LineChart) -> list[float]:
    """Return how many points each curve is moved aside, so that no mark lies over that of another curve."""
    places = [{spot.x for spot in curve.spots} for curve in chart.curves]
    shared = [
        place
        for place, own in enumerate(places)
        if any(own & other for at, other in enumerate(places) if at != place)
    ]
    # Curves of many spots are lines with a mark here and there, and numbers of devices are few.
    if chart.x_scale != "log2" or any(len(curve.spots) > MAX_MARKS for curve in chart.curves):
        shared = []
    step = min(APART, SPREAD / max(len(shared), 1))
    middle = (len(shared) - 1) / 2
    return [(shared.index(place) - middle) * step if place in shared else 0.0 for place in range(len(places))]


def _draw(axes: Axes, curve: Curve, look: Look, *, turn: tuple[int, int], y_scale: str, aside: float) -> None:
    place, curves = turn
    values = [_drawable(spot.value, y_scale) for spot in curve.spots]
    below = [spot.value - spot.low for spot in curve.spots]
    above = [spot.high - spot.value for spot in curve.spots]
    # Curves that coincide hide each other, so their marks take turns.
    stride = max(curves, len(values) // MAX_MARKS * 2)
    moved = ScaledTranslation(aside / 72, 0, axes.figure.dpi_scale_trans)
    axes.errorbar(
        [spot.x for spot in curve.spots],
        values,
        yerr=(below, above) if any(value > 0 for value in below + above) else None,
        color=COLOURS[look.colour],
        marker=look.mark,
        markevery=(place * stride // curves, stride) if len(values) > MAX_MARKS else None,
        linestyle=look.line,
        capsize=3,
        transform=axes.transData + moved,
    )
    # Matplotlib fits no axis to what is drawn through a transformation of one's own.
    ends = [(spot.x, _drawable(end, y_scale)) for spot in curve.spots for end in (spot.low, spot.high)]
    axes.update_datalim([end for end in ends if all(map(math.isfinite, end))])
    axes.autoscale_view()


def _drawable(value: float, y_scale: str) -> float:
    """Return a gap for what has no place on the axis: a logarithmic one has no zero."""
    return math.nan if y_scale == "log10" and value <= 0 else value


def _x_axis(axes: Axes, chart: LineChart) -> None:
    places = {spot.x for curve in chart.curves for spot in curve.spots if math.isfinite(spot.x)} or {1.0}
    axes.set_xlabel(chart.x_label)
    if chart.x_scale == "log2":
        lowest, highest = math.floor(math.log2(min(places))), math.ceil(math.log2(max(places)))
        axes.set_xscale("log", base=2)
        axes.set_xlim(2 ** (lowest - 0.5), 2 ** (highest + 0.5))
        stride = 1 + (highest - lowest) // 8
        axes.xaxis.set_major_locator(
            FixedLocator([2.0**power for power in range(lowest, highest + 1, stride)])
        )
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
    if chart.y_scale == "log10":
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(low, max(high, 2 * (chart.limit or 0)))
        label_logarithmic(axes.yaxis)
        return
    values = [end for curve in chart.curves for spot in curve.spots for end in (spot.low, spot.high)]
    finite = [value for value in values if math.isfinite(value)] or [1.0]
    if chart.y_scale == "relative":
        low, high = min(0.9, *finite), max(1.0, *finite)
        axes.set_ylim(low - 0.2 * (high - low), high + 0.15 * (high - low))
        axes.axhline(1.0, color=COLOURS["ink"], linewidth=0.8, zorder=0.9)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    elif chart.y_scale != "linear":
        axes.set_ylim(0, max(finite) * 1.2 or 1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: TICKS.get(chart.y_scale, number)(value)))


def _label(axes: Axes, chart: LineChart, looks: list[Look]) -> None:
    if chart.y_scale in ("linear", "log10"):
        return  # the shape of such a curve is what it is drawn for
    # What a relative curve starts with is 1 by its definition.
    start = 1 if chart.y_scale == "relative" else 0
    labels = [
        ChartLabel(x=spot.x, value=spot.value, text=_text(chart, spot), colour=look.colour, aside=shift)
        for curve, look, shift in zip(chart.curves, looks, _aside(chart), strict=True)
        for spot in curve.spots[start:]
    ]
    if len(labels) <= MAX_LABELS:
        marks = [
            (spot.x, spot.value, shift)
            for curve, shift in zip(chart.curves, _aside(chart), strict=True)
            for spot in curve.spots
        ]
        write_labels(axes, labels, marks=marks)


def _text(chart: LineChart, spot: Spot) -> str:
    return VALUES.get(chart.y_scale, number)(spot.value)


def _described(chart: LineChart) -> str:
    """Name the values of short curves, and the ends of long ones."""
    parts = []
    for curve in chart.curves:
        spots = curve.spots if len(curve.spots) <= MAX_MARKS else (curve.spots[0], curve.spots[-1])
        parts.append(
            f"{curve.label}: {', '.join(f'{_text(chart, one)} at {number(one.x)}' for one in spots)}"
        )
    return f"{chart.y_label} over {chart.x_label}. {'; '.join(parts)}."


class ChartLabel(Frozen):
    """A text that belongs to a spot."""

    x: float
    value: float
    text: str
    colour: str
    aside: float = 0.0
    """Points by which its spot is drawn to the right."""


def write_labels(
    axes: Axes, labels: Sequence[ChartLabel], *, marks: Sequence[tuple[float, float, float]]
) -> None:
    """Write each label where it is clear of every mark and of the labels before it; nowhere if it is not.

    Args:
        axes: with its limits, scales and texts set.
        marks: all spots that are drawn, each with the points by which it is moved to the right.
    """
    lay_out(axes.figure)  # type: ignore[arg-type] # canvas() has no subfigures
    to_points = 72 / axes.figure.dpi
    inside = _scaled(axes.get_window_extent(), to_points)
    places = [(axes.transData.transform((x, y)) * to_points, aside) for x, y, aside in marks]
    taken = [_box(x + aside, y, 2 * MARK, 2 * MARK) for (x, y), aside in places]
    for label in labels:
        x, y = axes.transData.transform((label.x, label.value)) * to_points
        width, height = LETTER * POINTS * len(label.text), LINE * POINTS
        for right, up, aside, above in PLACES:
            dx, dy = right * width + aside + label.aside, up * height + above
            box = _box(x + dx, y + dy, width, height)
            if _within(box, inside) and not any(box.overlaps(other) for other in taken):
                _write(axes, label, dx, dy)
                taken.append(box)
                break


def _write(axes: Axes, label: ChartLabel, dx: float, dy: float) -> None:
    axes.annotate(
        label.text,
        (label.x, label.value),
        xytext=(dx, dy),
        textcoords="offset points",
        ha="center",
        va="center",
        color=COLOURS[label.colour],
        fontsize=POINTS,
        bbox={"facecolor": COLOURS["paper"], "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
    ).set_in_layout(False)


def _box(x: float, y: float, width: float, height: float) -> Bbox:
    return Bbox.from_bounds(x - width / 2, y - height / 2, width, height)


def _scaled(box: Bbox, factor: float) -> Bbox:
    return Bbox(box.get_points() * factor)


def _within(box: Bbox, outer: Bbox) -> bool:
    return bool(outer.x0 <= box.x0 and outer.y0 <= box.y0 and box.x1 <= outer.x1 and box.y1 <= outer.y1)
