"""Values written beside their spots, none over another or over a mark."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from twinrun.foundation.manifest import Frozen
from twinrun.report.svg import COLOURS, lay_out

POINTS = 9
# Of a sans-serif text, in its font size: how wide a letter and how high a line is at most.
LETTER, LINE = 0.62, 1.2
# Half the side of the square that a mark covers.
MARK = 4.5
# Where a label may stand, in the order of preference: share of its width and height, then points on top.
PLACES = (
    (0, 0.5, 0, 7),
    (0, -0.5, 0, -7),
    (0.5, 0, 8, 0),
    (-0.5, 0, -8, 0),
    (0, 0.5, 0, 19),
    (0, -0.5, 0, -19),
)


class ChartLabel(Frozen):
    """A text that belongs to a spot."""

    x: float
    value: float
    text: str
    colour: str


def write_labels(axes: Axes, labels: Sequence[ChartLabel], *, marks: Sequence[tuple[float, float]]) -> None:
    """Write each label where it is clear of every mark and of the labels before it; nowhere if it is not.

    Args:
        axes: with its limits, scales and texts set.
        marks: all spots that are drawn.
    """
    lay_out(axes.figure)  # type: ignore[arg-type] # canvas() has no subfigures
    to_points = 72 / axes.figure.dpi
    inside = _scaled(axes.get_window_extent(), to_points)
    places = [axes.transData.transform(mark) * to_points for mark in marks]
    taken = [_box(x, y, 2 * MARK, 2 * MARK) for x, y in places]
    for label in labels:
        x, y = axes.transData.transform((label.x, label.value)) * to_points
        width, height = LETTER * POINTS * len(label.text), LINE * POINTS
        for right, up, aside, above in PLACES:
            dx, dy = right * width + aside, up * height + above
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
