"""Tables and pictures as data: terminal and report show the same tables, the report draws the pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import number, percent
from twinrun.protocol.measurements import Measurement

ABSENT = "-"
CurveKind = Literal["measured", "published", "reference", "baseline", "bound"]
MarkKind = CurveKind | Literal["predicted"]


class Cell(Frozen):
    """A value, and below it what qualifies it."""

    text: str
    detail: str = ""


class Column(Frozen):
    """A heading with its unit."""

    title: str
    numeric: bool = True
    whole: bool = False
    """Whether a text of the column stays on one line, as a number does."""


class Table(Frozen):
    """Rows of cells under columns; the first column names the row."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    """What the numbers rest on: formulas, peaks, sources."""


def word_columns(*titles: str) -> tuple[Column, ...]:
    """Return columns of words."""
    return tuple(Column(title=title, numeric=False) for title in titles)


def number_columns(*titles: str) -> tuple[Column, ...]:
    """Return columns of numbers."""
    return tuple(Column(title=title) for title in titles)


def text(value: str, detail: str = "") -> Cell:
    """Return a cell of words."""
    return Cell(text=value, detail=detail)


def word_table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], notes: tuple[str, ...] = ()
) -> Table:
    """Return a table of words alone."""
    cells = tuple(tuple(map(text, row)) for row in rows)
    return Table(title=title, columns=word_columns(*heads), rows=cells, notes=notes)


def measured(found: Measurement | None, *, share: bool = False) -> Cell:
    """Return the median with how far the farthest sample is from it, a dash where there is none."""
    if found is None:
        return Cell(text=ABSENT)
    if share or found.count < 2 or not found.median:
        return Cell(text=percent(found.median) if share else number(found.median))
    farthest = max(found.high - found.median, found.median - found.low) / found.median
    return Cell(text=number(found.median), detail=f"±{farthest:.1%}")


class Spot(Frozen):
    """One point of a curve, with the lowest and highest of its samples."""

    x: float
    value: float
    low: float
    high: float


class Curve(Frozen):
    """Spots that belong together."""

    label: str
    kind: CurveKind
    place: int
    """Among those of its kind; the same series has the same place in every chart."""
    spots: tuple[Spot, ...]
    detail: str = ""
    """The numbers as they stand in the source, and which source."""


def exact(x: float, value: float) -> Spot:
    """Return a spot of a number that has no spread."""
    return Spot(x=x, value=value, low=value, high=value)


def sampled(x: float, found: Measurement) -> Spot:
    """Return the spot of a measurement."""
    return Spot(x=x, value=found.median, low=found.low, high=found.high)


def curve(label: str, kind: CurveKind, place: int, spots: Iterable[Spot], detail: str = "") -> Curve:
    """Return a curve with its spots in order."""
    ordered = tuple(sorted(spots, key=lambda spot: spot.x))
    return Curve(label=label, kind=kind, place=place, spots=ordered, detail=detail)


class LineChart(Frozen):
    """Curves over one axis."""

    name: str
    """Identifier in the page."""
    title: str
    x_label: str
    x_scale: Literal["log2", "log10", "linear"] = "linear"
    y_label: str
    """With unit and formula."""
    y_scale: Literal["share", "relative", "count", "linear", "log10"] = "linear"
    """`share` is drawn in percent, `count` from zero; `relative` is to the first spot of each curve."""
    curves: tuple[Curve, ...]
    limit: float | None = None
    """A line that curves should stay below."""
    notes: tuple[str, ...] = ()
    """What a reader must know to read it right."""


class Mark(Frozen):
    """One value; `low` and `high` are the extremes of its samples, or of its interval."""

    kind: MarkKind
    value: float
    low: float
    high: float
    detail: str = ""


def exact_mark(kind: MarkKind, value: float, detail: str = "") -> Mark:
    """Return a mark of a number that has no spread."""
    return Mark(kind=kind, value=value, low=value, high=value, detail=detail)


class Row(Frozen):
    """Marks of one thing on one line, for example of a GPU."""

    label: str
    marks: tuple[Mark, ...] = ()
    said: str | None = None
    """What stands at the end of the row; the values of its marks where it is left out."""


class RowChart(Frozen):
    """Rows of marks over one axis."""

    name: str
    title: str
    x_label: str
    """With unit."""
    rows: tuple[Row, ...]
    ticks: dict[float, str] | None = None
    """Of a logarithmic axis that ends with the first and the last; linear from 0 where there are none."""
    notes: tuple[str, ...] = ()


Chart = LineChart | RowChart
