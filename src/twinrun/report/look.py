"""What a curve looks like: its kind decides the colours and marks it may have, its place which of them."""

from __future__ import annotations

from twinrun.foundation.manifest import Frozen
from twinrun.report.svg import SERIES
from twinrun.workloads.charts import Kind

# No mark belongs to two kinds. The marks of measured curves and their colours are coprime in number, so that
# the two together repeat after 72 curves only.
MARKS: dict[Kind, str] = {
    "measured": "o^sv>P<X*",
    "published": "Dh",
    "reference": "dpx+14",
    "baseline": "H",
    "bound": "_",
}
COLOURS: dict[Kind, str] = {
    "published": "published",
    "reference": "reference",
    "baseline": "baseline",
    "bound": "ink",
}
LINES: dict[Kind, str] = {
    "published": "--",
    "reference": ":",
    "baseline": "-.",
    "bound": "--",
    "measured": "-",
}


class Look(Frozen):
    """How a curve is drawn."""

    colour: str
    """CSS variable of the page, without its dashes."""
    mark: str
    """Of matplotlib."""
    line: str


def look_of(kind: Kind, place: int) -> Look:
    """Return the look of the curve at `place` among those of its kind."""
    marks = MARKS[kind]
    return Look(
        colour=COLOURS.get(kind) or f"series-{place % SERIES + 1}",
        mark=marks[place % len(marks)],
        line=LINES[kind],
    )
