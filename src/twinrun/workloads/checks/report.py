"""What checks found, as tables."""

from __future__ import annotations

from collections import Counter

from twinrun.foundation.text import plural
from twinrun.protocol.checks import failed_nodes
from twinrun.workloads.checks.plan import ChecksPlan, ChecksPoint
from twinrun.workloads.tables_and_charts import ABSENT, Cell, Table, text, word_columns
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
    rows, failed, counts = [], [], Counter[str]()
    for spec in part.checks:
        found = [one for one in point.checks if one.id == spec.id]
        worst = min((one.outcome for one in found), key=SEVERITY.index, default="unknown")
        blamed = [one for one in found if one.outcome == worst]
        where = ", ".join(dict.fromkeys(node for one in blamed for node in one.nodes or (one.place,)))
        counts[worst] += 1
        failed += [f"{spec.id} on {where}"] if worst == "fail" else []
        rows.append(_row(spec.id, spec.title, SIGNS[worst], ABSENT if worst == "pass" else where))
    passed = f"{counts['pass']} of {plural(len(rows), 'check')} passed"
    said = f"{passed}, {counts['unknown']} not known, {len(failed)} failed{': ' if failed else ''}"
    columns = word_columns("check", "asks", "outcome", "where")
    return Table(title=f"{point.id}: {said}{'; '.join(failed)}", columns=columns, rows=tuple(rows))


def _outcomes(point: MeasuredPoint) -> Table:
    counts = Counter(one.outcome for one in point.checks)
    return Table(
        title=f"{point.id}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}",
        columns=word_columns("check", "outcome", "place", "reason", "remedy"),
        rows=tuple(
            _row(one.id, SIGNS[one.outcome], one.place, one.reason, one.remedy or ABSENT)
            for one in point.checks
        ),
    )


def _grid(point: MeasuredPoint) -> Table:
    """Return the worst outcome of each check at each node, its devices included, and at the allocation."""
    names, nodes = list(dict.fromkeys(one.id for one in point.checks)), failed_nodes(point.checks)
    places = (*dict.fromkeys((*point.hosts, *nodes)), WHOLE)
    found: dict[tuple[str, str], list[str]] = {}
    for one in point.checks:
        for place in {*one.nodes, one.place.partition(",")[0]}:
            found.setdefault((one.id, place), []).append(one.outcome)
    worst = {key: SIGNS[min(outcomes, key=SEVERITY.index)] for key, outcomes in found.items()}
    return Table(
        title=f"{point.id}: nodes and checks",
        columns=word_columns("check", *places),
        rows=tuple(_row(name, *(worst.get((name, place), ABSENT) for place in places)) for name in names),
        notes=(f"nodes to exclude: {', '.join(nodes) or 'none'}",),
    )


def _row(*words: str) -> tuple[Cell, ...]:
    return tuple(map(text, words))
