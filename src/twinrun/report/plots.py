"""Pictures over the number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from twinrun.manifest import Frozen
from twinrun.report.series import Chart, Kind, Series, Spot
from twinrun.report.svg import COLOURS, SIGNS, Key, Picture, canvas, series_colour, svg_text
from twinrun.report.words import number, percent

# More values than this cannot stand beside their points without covering each other.
MAX_LABELS = 12
MARKS: dict[Kind, str] = {"measured": "o^vP", "published": "D", "reference": "s*X"}
TICKS = {"share": "{:.0%}".format, "relative": "{:.2f}".format, "count": number}
VALUES = {"share": percent, "relative": "{:.3f}".format, "count": number}


def scaling(chart: Chart, *, name: str, title: str) -> Picture:
    """Draw a chart over the number of devices."""
    looks = [_look(one) for one in chart.series]
    with canvas() as (figure, axes):
        for one, look in zip(chart.series, looks, strict=True):
            _draw(axes, one, look)
        _devices_axis(axes, chart.series)
        _value_axis(axes, chart)
        _label_values(axes, chart, looks)
        svg = svg_text(figure, name=name, title=title, description=_described(chart))
    keys = tuple(
        Key(sign=SIGNS[look.mark], colour=look.colour, label=one.label, detail=one.detail)
        for one, look in zip(chart.series, looks, strict=True)
    )
    return Picture(svg=svg, title=title, keys=keys, notes=chart.notes)


class _Look(Frozen):
    colour: str
    mark: str
    line: str


def _look(series: Series) -> _Look:
    """Tell by colour and mark whether a series was measured here, and by its place which one it is."""
    marks = MARKS[series.kind]
    return _Look(
        colour=series_colour(series.place) if series.kind == "measured" else series.kind,
        mark=marks[series.place % len(marks)],
        line="-" if series.kind == "measured" else "--",
    )


def _draw(axes: Axes, series: Series, look: _Look) -> None:
    below = [spot.value - spot.low for spot in series.spots]
    above = [spot.high - spot.value for spot in series.spots]
    axes.errorbar(
        [spot.devices for spot in series.spots],
        [spot.value for spot in series.spots],
        yerr=(below, above) if any(below + above) else None,
        color=COLOURS[look.colour],
        marker=look.mark,
        linestyle=look.line,
        capsize=3,
    )


def _devices_axis(axes: Axes, series: Sequence[Series]) -> None:
    counts = {spot.devices for one in series for spot in one.spots} or {1}
    lowest, highest = min(counts).bit_length() - 1, (max(counts) - 1).bit_length()
    axes.set_xscale("log", base=2)
    axes.set_xlim(2 ** (lowest - 0.5), 2 ** (highest + 0.5))
    axes.xaxis.set_major_locator(FixedLocator([2**power for power in range(lowest, highest + 1)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.set_xlabel("devices")


def _value_axis(axes: Axes, chart: Chart) -> None:
    values = [value for one in chart.series for spot in one.spots for value in (spot.low, spot.high)]
    if chart.scale == "relative":
        low, high = min(0.9, *values), max(1.0, *values)
        axes.set_ylim(low - 0.2 * (high - low), high + 0.1 * (high - low))
        axes.axhline(1.0, color=COLOURS["ink"], linewidth=0.8, zorder=0.9)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    else:
        axes.set_ylim(0, max(values, default=1.0) * 1.2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: TICKS[chart.scale](value)))
    axes.set_ylabel(chart.quantity)


def _label_values(axes: Axes, chart: Chart, looks: Sequence[_Look]) -> None:
    """Write each value at its point, those of one column of points clear of each other."""
    # What a relative series starts with is 1 by its definition.
    start = 1 if chart.scale == "relative" else 0
    spots = [
        (spot, look) for one, look in zip(chart.series, looks, strict=True) for spot in one.spots[start:]
    ]
    if len(spots) > MAX_LABELS:
        return
    low, high = axes.get_ylim()
    gap = (high - low) * 0.075
    spots.sort(key=lambda item: (item[0].devices, item[0].value))
    for _, together in groupby(spots, key=lambda item: item[0].devices):
        column = list(together)
        heights = label_heights([spot for spot, _ in column], gap, above=chart.scale != "relative")
        for (spot, look), height in zip(column, heights, strict=True):
            label = axes.text(spot.devices, height, VALUES[chart.scale](spot.value), ha="center", va="center")
            label.set(color=COLOURS[look.colour], fontsize=9)
            label.set_bbox({"facecolor": COLOURS["paper"], "edgecolor": "none", "pad": 0.5, "alpha": 0.8})


def label_heights(spots: Sequence[Spot], gap: float, *, above: bool) -> list[float]:
    """Return a height for the label of each spot, in rising order of value, no two closer than `gap`.

    Of two spots that are close the nearer one to the other side gets its label there.
    """
    if not above:
        mirrored = [
            Spot(devices=spot.devices, value=-spot.value, low=-spot.high, high=-spot.low)
            for spot in reversed(spots)
        ]
        return [-height for height in reversed(label_heights(mirrored, gap, above=True))]
    heights: list[float] = []
    for place, spot in enumerate(spots):
        crowded = place == 0 and len(spots) > 1 and spots[1].value - spot.value < 2 * gap
        height = spot.low - gap if crowded else spot.high + gap
        heights.append(max(height, heights[-1] + gap) if heights else height)
    return heights


def _described(chart: Chart) -> str:
    parts = []
    for one in chart.series:
        values = ", ".join(f"{VALUES[chart.scale](spot.value)} at {spot.devices}" for spot in one.spots)
        parts.append(f"{one.label}: {values}")
    return f"{chart.quantity} over the number of devices. {'; '.join(parts)}."
