"""Tables as data: the terminal and the report draw the same ones."""

from __future__ import annotations

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import number, percent
from twinrun.protocol.measurements import Measurement

ABSENT = "-"


class Cell(Frozen):
    """A value, and below it what qualifies it."""

    text: str
    detail: str = ""


class Column(Frozen):
    """A heading with its unit."""

    title: str
    numeric: bool = True


class Table(Frozen):
    """Rows of cells under columns; the first column names the row."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    """What the numbers rest on: formulas, peaks, sources."""


def text(value: str, detail: str = "") -> Cell:
    """Return a cell of words."""
    return Cell(text=value, detail=detail)


def measured(found: Measurement | None, *, share: bool = False) -> Cell:
    """Return the median with how far the farthest sample is from it, a dash where there is none."""
    if found is None:
        return Cell(text=ABSENT)
    shown = percent(found.median) if share else number(found.median)
    return Cell(text=shown, detail="" if share else within(found))


def within(found: Measurement) -> str:
    """Return how far the farthest sample is from the median."""
    farthest = max(found.high - found.median, found.median - found.low)
    return f"±{farthest / found.median:.1%}" if found.median and found.count > 1 else ""
