"""Our kernels beside every alternative and the roofline bound: a table with bars for each GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from twinrun.foundation.text import markdown_table
from twinrun.results.record import Record, hardware

# The mode of a record that names none.
KERNELS = "kernels"
# Of the picture: pixels of a bar at the whole bound, and of a bar's height.
BAR_WIDTH, BAR_HEIGHT = 120, 10


@dataclass(kw_only=True)
class KernelRow:
    """One call of one case on one GPU."""

    name: str
    mode: str
    ours: float | None = None
    """Milliseconds, the median."""
    others: dict[str, float] = field(default_factory=dict)
    """Milliseconds of each alternative."""
    share: float | None = None
    """How much of the roofline bound ours reaches: bound over time."""


def kernels(records: Mapping[str, Sequence[Record]]) -> str:
    """Return the page's sections as Markdown: one for each recipe and GPU.

    Args:
        records: of each benchmark the records that the pages show, by the recipe's title.
    """
    return "\n\n".join(
        part
        for title, shown in records.items()
        for record in shown
        if rows_of(record)
        for part in (
            f"## {title}, {hardware(record)}",
            f"Stack `{record.plan.stack}`, {record.created[:10]}.",
            table(record),
        )
    )


def table(record: Record) -> str:
    """Return the rows of one record."""
    rows = rows_of(record)
    names = sorted({name for row in rows for name in row.others})
    columns = ("case and call", "timed", "ours, ms", *(f"{name}, ms" for name in names), "share of the bound")
    return markdown_table(columns, [_cells(row, names) for row in rows])


def rows_of(record: Record) -> list[KernelRow]:
    """Return every timed call of a record, in its order."""
    found: defaultdict[tuple[str, str], KernelRow] = defaultdict(lambda: KernelRow(name="", mode=KERNELS))
    for point in record.points:
        for one in point.measurements:
            if "call" not in one.labels or one.median is None or one.metric not in {"time", "roofline-share"}:
                continue
            call = one.labels["call"]
            row = found[point.id, call]
            row.name, row.mode = f"{point.id} {call}", one.labels.get("mode", KERNELS)
            if one.metric == "roofline-share":
                row.share = one.median if one.id == f"{call}/roofline-share" else row.share
            elif one.id == call:
                row.ours = one.median
            else:
                row.others[one.labels["implementation"]] = one.median
    return [row for row in found.values() if row.ours is not None]


def _cells(row: KernelRow, names: Sequence[str]) -> tuple[str, ...]:
    times = [row.others.get(name) for name in names]
    fastest = min((time for time in (row.ours, *times) if time is not None), default=None)
    cells = ("-" if time is None else _time(time, fastest) for time in (row.ours, *times))
    return (row.name, row.mode, *cells, "-" if row.share is None else bar(row.share))


def _time(time: float, fastest: float | None) -> str:
    text = f"{time:.3g}"
    return f"**{text}**" if time == fastest else text


def bar(share: float) -> str:
    """Return a share of the bound as a bar, with its number beside it."""
    width = round(BAR_WIDTH * min(share, 1.0))
    title = escape(f"{share:.0%} of the roofline bound")
    return (
        f'<svg width="{BAR_WIDTH}" height="{BAR_HEIGHT}" role="img" aria-label="{title}">'
        f'<rect width="{BAR_WIDTH}" height="{BAR_HEIGHT}" fill="none" stroke="currentColor"/>'
        f'<rect width="{width}" height="{BAR_HEIGHT}" fill="currentColor"/></svg> {share:.0%}'
    )
