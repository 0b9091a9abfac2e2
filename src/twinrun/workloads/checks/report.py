"""What checks found, as tables."""

from __future__ import annotations

from collections import Counter

from twinrun.foundation.text import plural
from twinrun.protocol.checks import failed_nodes
from twinrun.workloads.checks.manifest import ChecksPlan, ChecksPoint
from twinrun.workloads.tables_and_charts import ABSENT, Cell, Column, Table, text
from twinrun.workloads.workload import MeasuredPoint, RecordView

SIGNS = {"pass": "✓ pass", "fail": "✗ fail", "unknown": "? unknown"}
# Of several outcomes of one check on one node the first counts.
SEVERITY = ("fail", "unknown", "pass")
WHOLE = "allocation"


def show(record: RecordView[ChecksPlan, ChecksPoint]) -> tuple[Table, ...]:
    """Return what each check found, and the grid of nodes and checks, of every point."""
    return tuple(
        table
        for point in record.points
        for table in (_summary(record.part, point), _outcomes(point), _grid(point))
    )


def _summary(part: ChecksPlan, point: MeasuredPoint) -> Table:
    """Return a row a check, and in the title which of them failed and where."""
    rows, failed = [], []
    for spec in part.checks:
        found = [one for one in point.checks if one.id == spec.id]
        worst = min((one.outcome for one in found), key=SEVERITY.index, default="unknown")
        blamed = [one for one in found if one.outcome == worst]
        where = ", ".join(dict.fromkeys(node for one in blamed for node in one.nodes or (one.place,)))
        if worst == "fail":
            failed.append(f"{spec.id} on {where}")
        rows.append(
            (text(spec.id), text(spec.title), text(SIGNS[worst]), text(ABSENT if worst == "pass" else where))
        )
    passed = sum(row[2] == text(SIGNS["pass"]) for row in rows)
    unknown = sum(row[2] == text(SIGNS["unknown"]) for row in rows)
    counts = f"{passed} of {plural(len(rows), 'check')} passed, {unknown} not known, {len(failed)} failed"
    return Table(
        title=f"{point.id}: {counts}{': ' if failed else ''}{'; '.join(failed)}",
        columns=tuple(Column(title=title, numeric=False) for title in ("check", "asks", "outcome", "where")),
        rows=tuple(rows),
    )


def _outcomes(point: MeasuredPoint) -> Table:
    counts = Counter(one.outcome for one in point.checks)
    columns = ("check", "outcome", "place", "reason", "remedy")
    return Table(
        title=f"{point.id}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}",
        columns=tuple(Column(title=title, numeric=False) for title in columns),
        rows=tuple(
            (
                text(one.id),
                text(SIGNS[one.outcome]),
                text(one.place),
                text(one.reason),
                text(one.remedy or ABSENT),
            )
            for one in point.checks
        ),
    )


def _grid(point: MeasuredPoint) -> Table:
    names = list(dict.fromkeys(one.id for one in point.checks))
    nodes = failed_nodes(point.checks)
    hosts = list(dict.fromkeys((*point.hosts, *nodes)))
    return Table(
        title=f"{point.id}: nodes and checks",
        columns=tuple(Column(title=title, numeric=False) for title in ("check", *hosts, WHOLE)),
        rows=tuple(
            (text(name), *(_cell(point, name, host) for host in hosts), _cell(point, name, WHOLE))
            for name in names
        ),
        notes=(f"nodes to exclude: {', '.join(nodes) or 'none'}",),
    )


def _cell(point: MeasuredPoint, name: str, node: str) -> Cell:
    """Return the worst outcome of a check at a node, its devices included."""
    found = [
        one.outcome
        for one in point.checks
        if one.id == name and (node in one.nodes or one.place.partition(",")[0] == node)
    ]
    return text(SIGNS[min(found, key=SEVERITY.index)] if found else ABSENT)
