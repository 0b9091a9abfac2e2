"""What checks found, as operators' programs read it: a textfile for node-exporter, and health.json."""

from __future__ import annotations

import contextlib
import datetime
import functools
import re
from collections.abc import Iterator
from typing import Literal

from twinrun.foundation.manifest import Frozen
from twinrun.protocol.measurements import Check
from twinrun.workloads.workload import PointRecord, RecordView

TEXTFILE, HEALTH_FILE = "twinrun.prom", "health.json"
_ALLOCATION = "allocation"
VALUES = {"pass": "1", "fail": "0", "unknown": "NaN"}


class NodeCheck(Frozen):
    """The outcome of one check at one node or device."""

    check: str
    node: str
    device: str = ""
    """Empty for a check of the node."""
    outcome: Literal["pass", "fail", "unknown"]
    reason: str
    remedy: str | None = None


class Health(Frozen):
    """health.json."""

    run: str
    created: str
    """UTC, ISO 8601."""
    checks: tuple[NodeCheck, ...]


def health_of(record: RecordView) -> Health:
    """Return what a record of checks says of every node, and when its run began, as the run's name has it."""
    checks = [(point, check) for point in record.points for check in point.checks]
    found = tuple(one for point, check in checks for one in _of_nodes(point, check))
    began = datetime.datetime.fromtimestamp(0, datetime.UTC)
    with contextlib.suppress(ValueError):
        began = datetime.datetime.strptime(record.run[:15], "%Y%m%d-%H%M%S").replace(tzinfo=datetime.UTC)
    return Health(run=record.run, created=began.isoformat(timespec="seconds"), checks=found)


def _of_nodes(point: PointRecord, check: Check) -> Iterator[NodeCheck]:
    """Yield a check for each node that it is about; one of several nodes fails at those that it names."""
    host, _, device = check.place.partition(", device ")
    made = functools.partial(NodeCheck, check=check.id)
    told = functools.partial(made, outcome=check.outcome, reason=check.reason, remedy=check.remedy)
    if host != _ALLOCATION and not check.nodes:
        yield told(node=host, device=device)
        return
    for node in dict.fromkeys((*point.hosts, *check.nodes)):
        named = node in check.nodes or not check.nodes
        yield told(node=node) if named else made(node=node, outcome="pass", reason="")


def textfile(health: Health) -> str:
    """Return the metrics of all nodes: a gauge a check, 1 passed, 0 failed, NaN not known."""
    lines = []
    for name in dict.fromkeys(one.check for one in health.checks):
        metric = f"twinrun_check_{re.sub('[^a-z0-9]', '_', name)}"
        lines.append(f"# HELP {metric} Whether the check {name} passed: 1 yes, 0 no, NaN not known.")
        lines.append(f"# TYPE {metric} gauge")
        found = {(one.node, one.device): VALUES[one.outcome] for one in health.checks if one.check == name}
        lines += [
            f'{metric}{{node="{_escaped(node)}",device="{_escaped(device)}"}} {value}'
            for (node, device), value in found.items()
        ]
    seconds = datetime.datetime.fromisoformat(health.created).timestamp()
    lines += [
        "# HELP twinrun_checks_timestamp_seconds When the checks ran.",
        "# TYPE twinrun_checks_timestamp_seconds gauge",
        f"twinrun_checks_timestamp_seconds {seconds:.0f}",
    ]
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
