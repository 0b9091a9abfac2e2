"""Our kernels beside every alternative and the roofline bound: a table for each GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from twinrun.foundation.text import markdown_table, percent
from twinrun.results.judged import Judged, hardware

# The mode of a record that names none, our own kernels among those of others, and their share of the bound.
KERNELS, OURS, SHARE = "kernels", "ours, ms", "share of the bound"


def kernels(records: Mapping[str, Sequence[Judged]]) -> str:
    """Return the page's sections as Markdown: one for each recipe and GPU.

    Args:
        records: of each benchmark the records that the pages show, by the recipe's title.
    """
    parts = []
    for title, shown in records.items():
        for record in shown:
            if rows := rows_of(record):
                parts += [
                    f"## {title}, {hardware(record)}",
                    f"Stack `{record.plan.stack}`, {record.created[:10]}.",
                ]
                parts.append(_table(rows))
    return "\n\n".join(parts)


def rows_of(record: Judged) -> dict[tuple[str, str], dict[str, float]]:
    """Return by name and mode of every timed call its median times, and our share of the roofline bound."""
    found: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for point in record.points:
        for one in point.measurements:
            if (call := one.labels.get("call")) is None:
                continue
            row = found[f"{point.id} {call}", one.labels.get("mode", KERNELS)]
            if one.id == f"{call}/roofline-share":
                row[SHARE] = one.median
            elif one.metric == "time":
                row[OURS if one.id == call else f"{one.labels['implementation']}, ms"] = one.median
    return {name: row for name, row in found.items() if OURS in row}


def _table(rows: Mapping[tuple[str, str], Mapping[str, float]]) -> str:
    """Return a row for each call; the fastest time is bold."""
    others = sorted({name for row in rows.values() for name in row} - {OURS, SHARE})
    cells = []
    for name, row in rows.items():
        times = [row.get(one) for one in (OURS, *others)]
        fastest = min(time for time in times if time is not None)
        shown = [
            "-" if one is None else f"**{one:.3g}**" if one == fastest else f"{one:.3g}" for one in times
        ]
        cells.append((*name, *shown, percent(row[SHARE]) if SHARE in row else "-"))
    return markdown_table(("case and call", "timed", OURS, *others, SHARE), cells)
