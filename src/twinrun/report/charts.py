"""Charts to pictures: curves, bars and rooflines as SVG text in the style of the page around them."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

from markupsafe import escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from matplotlib.transforms import Bbox, ScaledTranslation

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import TERA, number, percent, visible
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
# Attributes of SVG that place something, and numbers of more digits than they need.
PLACED = re.compile(r'\b(?:d|x|y|points|transform)="[^"]*"')
LONG = re.compile(r"-?\d+\.\d{2,}(?![\de])")
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


def draw_lines(chart: LineChart) -> Picture:
    """Draw a chart of curves."""
    chart = _without_repeats(chart)
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


SERIES = 8
# A logarithmic axis that is shorter than this many times its start has room for three labels a decade.
LABELLED_THRICE = 300
# Marks of matplotlib, and the characters that stand for them in text.
SIGNS = {
    "o": "●",
    "^": "▲",
    "s": "■",
    "v": "▼",
    "p": "⬟",
    ">": "▶",
    "h": "⬢",
    "<": "◀",
    "D": "◆",
    "*": "★",
    "X": "✖",
    "P": "✚",
    "d": "♦",
    "H": "⬣",
    "x": "✕",
    "+": "+",
    "1": "⅄",
    "4": "≻",
    "_": "━",
}
# Stand-ins that occur nowhere else; in the SVG each becomes the CSS variable it is named after.
COLOURS = {
    "ink": "#01f001",
    "grid": "#01f002",
    "paper": "#01f003",
    "published": "#01f004",
    "reference": "#01f005",
    "baseline": "#01f006",
    "limit": "#01f007",
    **{f"series-{place + 1}": f"#01f01{place}" for place in range(SERIES)},
}
# Any: matplotlib's releases disagree about the type of these names.
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS["grid"],
    "axes.grid": True,
    "axes.labelcolor": COLOURS["ink"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 11,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 6,
    "svg.fonttype": "none",
    "svg.hashsalt": "twinrun",
    "text.color": COLOURS["ink"],
    # Names come from machines; a dollar sign in one is not the start of a formula.
    "text.parse_math": False,
    "xtick.color": COLOURS["ink"],
    "ytick.color": COLOURS["ink"],
}
# No mark belongs to two kinds. The marks of measured curves and their colours are coprime in number, so that
# the two together repeat after 72 curves only.
MARKS: dict[CurveKind, str] = {
    "measured": "o^sv>P<X*",
    "published": "Dh",
    "reference": "dpx+14",
    "baseline": "H",
    "bound": "_",
}
CURVE_COLOURS: dict[CurveKind, str] = {
    "published": "published",
    "reference": "reference",
    "baseline": "baseline",
    "bound": "ink",
}
LINES: dict[CurveKind, str] = {
    "published": "--",
    "reference": ":",
    "baseline": "-.",
    "bound": "--",
    "measured": "-",
}


class Key(Frozen):
    """One entry of a picture's legend."""

    sign: str
    colour: str
    """CSS variable of the page, without its dashes."""
    label: str
    detail: str = ""


class Picture(Frozen):
    """An inline SVG and all that stands under it."""

    svg: str
    title: str
    keys: tuple[Key, ...]
    notes: tuple[str, ...]


@contextmanager
def canvas(*, height: float = 3.4) -> Iterator[tuple[Figure, Axes]]:
    """Give a figure in the page's style, wide enough for a telephone, `height` inches high."""
    with rc_context(STYLE):
        figure = Figure(figsize=(5, height), layout="constrained")
        yield figure, figure.add_subplot()


def label_logarithmic(axis: Axis) -> None:
    """Label a logarithmic axis in plain numbers, once its limits are set.

    Matplotlib's own, also those it adds on a short axis, are mathematical text: SVG would show its source.
    """
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < LABELLED_THRICE * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(NullFormatter())


def lay_out(figure: Figure) -> None:
    """Place the axes by what is drawn so far, once: what is drawn later moves nothing."""
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        # An engine, also one that does nothing, makes Matplotlib draw twice.
        figure.set_layout_engine(None)


def svg_text(figure: Figure, *, name: str, title: str, description: str) -> str:
    """Render `figure` for a page; `name` is unique on the page and starts every identifier.

    The same figure gives the same bytes.
    """
    lay_out(figure)
    stream = io.StringIO()
    without = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(stream, format="svg", transparent=True, metadata=without)
    text = stream.getvalue()
    # Its style sheet would reach the whole page; the page has the same rule for its own pictures.
    text = re.sub(r"<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    # A tenth of a pixel is all that a reader sees, and places are most of what a picture weighs.
    text = PLACED.sub(lambda found: LONG.sub(lambda one: f"{float(one[0]):.1f}", found[0]), text)
    for variable, stand_in in COLOURS.items():
        text = text.replace(stand_in, f"var(--{variable})")
    opening, rest = text.split(">", 1)
    opening = re.sub(r' (width|height|version)="[^"]*"', "", opening)
    return (
        f'{opening} role="img" aria-labelledby="{name}-title {name}-description">'
        f'<title id="{name}-title">{escape(visible(title))}</title>'
        f'<desc id="{name}-description">{escape(visible(description))}</desc>{rest}'
    )


class Look(Frozen):
    """How a curve is drawn."""

    colour: str
    """CSS variable of the page, without its dashes."""
    mark: str
    """Marker of matplotlib."""
    line: str


def look_of(kind: CurveKind, place: int) -> Look:
    """Return the look of the curve at `place` among those of its kind."""
    marks = MARKS[kind]
    return Look(
        colour=CURVE_COLOURS.get(kind) or f"series-{place % SERIES + 1}",
        mark=marks[place % len(marks)],
        line=LINES[kind],
    )


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
