"""Charts to pictures: curves, bars and rooflines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox, ScaledTranslation

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import TERA, number, percent
from twinrun.report.picture import (
    COLOURS,
    HEIGHT,
    SERIES,
    SIGNS,
    Key,
    Picture,
    canvas,
    label_logarithmic,
    lay_out,
    svg_text,
)
from twinrun.workloads.tables_and_charts import (
    BarChart,
    BarKind,
    Chart,
    Curve,
    CurveKind,
    LineChart,
    RooflineChart,
    RooflineSpot,
    Spot,
)

# More values than this are a cloud of numbers, and the table has them.
MAX_LABELS = 12
# A curve of more spots has a mark at some of them only.
MAX_MARKS = 12
BINARY = ("", "Ki", "Mi", "Gi", "Ti")
VALUES: dict[str, Callable[[float], str]] = {"share": percent, "relative": "{:.3f}".format}
TICKS: dict[str, Callable[[float], str]] = {"share": "{:.0%}".format, "relative": "{:.2f}".format}
POINTS = 9
# Half the side of the square that a mark covers.
MARK = 4.5
# Points between the marks of curves that share a place on the x axis, and over all of them.
APART, SPREAD = 4.0, 14.0
# Where a label may stand, in the order of preference: its alignment, then points from its spot.
PLACES = (
    ("center", "bottom", 0, 7),
    ("center", "top", 0, -7),
    ("left", "center", 8, 0),
    ("right", "center", -8, 0),
    ("center", "bottom", 0, 19),
    ("center", "top", 0, -19),
)


# More curves than this have a legend instead of their names.
MAX_NAMES = 8
# Letters in a line of a name, the inches that the line takes, and the share of the width left to the axes.
NAME_LETTERS, NAME_LINE, NAMED_AXES = 18, 0.155, 0.71
PUBLISHED: tuple[CurveKind, ...] = ("published", "reference")


def draw_beside(chart: Chart) -> tuple[Picture, ...]:
    """Draw what was published, then what was measured, on the same axes; one picture where either lacks."""
    if not isinstance(chart, LineChart):
        return (draw(chart),)
    chart = _without_repeats(chart)
    theirs = tuple(curve for curve in chart.curves if curve.kind in PUBLISHED)
    ours = tuple(curve for curve in chart.curves if curve.kind not in PUBLISHED)
    if not (theirs and ours):
        return (draw_lines(chart),)
    what = chart.title.removesuffix(", published and measured")
    titles = {"title": f"Published: {what}", "name": f"{chart.name}-published", "notes": ()}
    return (
        draw_lines(chart.model_copy(update=titles | {"curves": theirs}), frame=chart),
        draw_lines(chart.model_copy(update={"curves": ours, "title": f"Measured: {what}"}), frame=chart),
    )


def draw_lines(chart: LineChart, *, frame: LineChart | None = None) -> Picture:
    """Draw a chart of curves, on the axes of the chart `frame` where one is given."""
    chart = _without_repeats(chart)
    looks = [look_of(curve.kind, curve.place) for curve in chart.curves]
    names = _names(chart)
    with canvas() as (figure, axes):
        for curve in (frame or chart).curves:
            _make_room(axes, curve, chart.y_scale)
        aside = _aside(chart)
        for place, (curve, look) in enumerate(zip(chart.curves, looks, strict=True)):
            _draw(axes, curve, look, turn=(place, len(looks)), y_scale=chart.y_scale, aside=aside[place])
        if chart.limit is not None:
            axes.axhline(chart.limit, color=COLOURS["limit"], linestyle="--")
        _x_axis(axes, frame or chart)
        _y_axis(axes, frame or chart)
        if names and (engine := figure.get_layout_engine()):
            engine.set(rect=(0, 0, NAMED_AXES, 1))  # type: ignore[call-arg] # of the constrained engine
        _label(axes, chart, looks)
        if names:
            lay_out(figure)
            _write_names(axes, names)
        svg = svg_text(figure, name=chart.name, title=chart.title, description=_described(chart))
    keys = [
        Key(sign=SIGNS[look.mark], colour=look.colour, label=curve.label, detail=curve.detail)
        for curve, look in zip(chart.curves, looks, strict=True)
    ]
    if chart.limit is not None:
        keys.append(Key(sign="╌", colour="limit", label=f"limit: {number(chart.limit)}"))
    return Picture(svg=svg, title=chart.title, keys=tuple(keys), notes=chart.notes, named=bool(names))


def _names(chart: LineChart) -> list[ChartLabel]:
    """Return the name of each curve at its last spot; none where they do not fit beside the axes."""
    found = [
        ChartLabel(
            x=ends[-1].x,
            value=ends[-1].value,
            text=textwrap.fill(curve.label.removeprefix("published elsewhere: "), NAME_LETTERS),
            colour=look_of(curve.kind, curve.place).colour,
            aside=aside,
        )
        for curve, aside in zip(chart.curves, _aside(chart), strict=True)
        if (ends := [spot for spot in curve.spots if math.isfinite(_drawable(spot.value, chart.y_scale))])
    ]
    if chart.limit is not None:
        text = f"limit: {number(chart.limit)}"
        last = max((one.x for one in found), default=1.0)
        found.append(ChartLabel(x=last, value=chart.limit, text=text, colour="limit"))
    room = sum(_lines(one) * NAME_LINE for one in found)
    return found if len(found) <= MAX_NAMES and room < HEIGHT else []


def _lines(label: ChartLabel) -> int:
    return label.text.count("\n") + 1


def _write_names(axes: Axes, names: Sequence[ChartLabel]) -> None:
    """Write each name right of the axes, as near to the height of its curve's end as the others let."""
    # In points, which a picture keeps whatever its resolution.
    points = 72 / axes.figure.dpi
    left, top = axes.get_window_extent().x1 * points + 12, axes.figure.bbox.height * points
    ordered = sorted(names, key=lambda one: one.value, reverse=True)
    spots = [axes.transData.transform((one.x, one.value)) * points for one in ordered]
    heights = [_lines(one) * NAME_LINE * 72 for one in ordered]
    places = spread([y for _, y in spots], heights, top)
    for name, (x, y), place in zip(ordered, spots, places, strict=True):
        axes.annotate(
            name.text,
            (x + name.aside, y),
            xycoords="figure points",
            xytext=(left, place),
            textcoords="figure points",
            va="center",
            linespacing=1.1,
            color=COLOURS[name.colour],
            fontsize=POINTS,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": COLOURS[name.colour],
                "linewidth": 0.7,
                "linestyle": ":",
                "shrinkB": 5,
            },
        ).set_in_layout(False)


def spread(wanted: Sequence[float], heights: Sequence[float], top: float) -> list[float]:
    """Return middles of boxes below `top`, near those wanted, from the highest, without an overlap."""
    found, roof = list[float](), top
    for middle, height in zip(wanted, heights, strict=True):
        found.append(min(middle, roof - height / 2))
        roof = found[-1] - height / 2
    floor = 0.0
    for place in reversed(range(len(found))):
        found[place] = max(found[place], floor + heights[place] / 2)
        floor = found[place] + heights[place] / 2
    return found


def _without_repeats(chart: LineChart) -> LineChart:
    """Leave out what was published elsewhere where a published curve has the same spots."""
    published = [_spots(curve) for curve in chart.curves if curve.kind == "published"]
    kept = [one for one in chart.curves if one.kind != "reference" or _spots(one) not in published]
    return chart.model_copy(update={"curves": tuple(kept)})


def _spots(curve: Curve) -> set[tuple[float, str]]:
    return {(spot.x, number(spot.value)) for spot in curve.spots}


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


def _make_room(axes: Axes, curve: Curve, y_scale: str) -> None:
    """Fit the axes to a curve: Matplotlib does not where a transformation of one's own draws it."""
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


def _label(axes: Axes, chart: LineChart, looks: list[Look]) -> None:
    if chart.y_scale in ("linear", "log10"):
        return  # the shape of such a curve is what it is drawn for
    # A relative curve starts with 1 by its definition.
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
    pixels, inside = axes.figure.dpi / 72, axes.get_window_extent()
    taken = []
    for x, y, aside in marks:
        (left, bottom), side = axes.transData.transform((x, y)), 2 * MARK * pixels
        taken.append(Bbox.from_bounds(left + aside * pixels - side / 2, bottom - side / 2, side, side))
    for label in labels:
        for horizontal, vertical, right, up in PLACES:
            written = _written(axes, label, horizontal, vertical, (right + label.aside, up))
            box = written.get_window_extent()
            clear = not any(box.overlaps(other) for other in taken)
            if (
                clear
                and inside.x0 <= box.x0
                and inside.y0 <= box.y0
                and box.x1 <= inside.x1
                and box.y1 <= inside.y1
            ):
                taken.append(box)
                break
            written.remove()


def _written(
    axes: Axes, label: ChartLabel, horizontal: str, vertical: str, offset: tuple[float, float]
) -> Annotation:
    """Write a label at an offset in points from its spot."""
    written = axes.annotate(
        label.text,
        (label.x, label.value),
        xytext=offset,
        textcoords="offset points",
        ha=horizontal,
        va=vertical,
        color=COLOURS[label.colour],
        fontsize=POINTS,
        bbox={"facecolor": COLOURS["paper"], "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
    )
    written.set_in_layout(False)
    return written


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


class Look(Frozen):
    """How a curve is drawn."""

    colour: str
    """CSS variable of the page, without its dashes."""
    mark: str
    """Marker of matplotlib."""
    line: str


def look_of(kind: CurveKind, place: int) -> Look:
    """Return the look of the curve at `place` among those of its kind."""
    colour, marks, line = LOOKS[kind]
    return Look(colour=colour or f"series-{place % SERIES + 1}", mark=marks[place % len(marks)], line=line)


# By kind of a bar: its colour, and what it is called.
BARS: dict[BarKind, tuple[str, str]] = {
    "published": ("published", "published"),
    "measured": ("series-1", "measured"),
    "baseline": ("baseline", "baseline, in the same process"),
    "bound": ("reference", "bound by the measured peak rates"),
    "reference": ("series-6", "published elsewhere"),
    "predicted": ("grid", "predicted, with its interval"),
}
INCHES_A_LINE, INCHES_AROUND = 0.22, 0.7
LABEL_LETTERS = 26
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
    colours = [COLOURS[BARS[bar.kind][0]] for bar in chart.bars]
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
        Key(sign="■", colour=BARS[kind][0], label=BARS[kind][1], detail="; ".join(found))
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
        svg = svg_text(figure, name=chart.name, title=chart.title, description=_described_roofline(chart))
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


def _described_roofline(chart: RooflineChart) -> str:
    spots = (
        f"{spot.label} at {number(spot.intensity)}: ours {number(spot.ours / TERA)}"
        + (f", baseline {number(spot.baseline / TERA)}" if spot.baseline else "")
        + (f", at most {number(spot.bound / TERA)}" if spot.bound else "")
        for spot in chart.spots
    )
    return f"Trillions of operations a second over operations for a byte. {'; '.join(spots)}."
