"""From the checks of a record to what they say of every node."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Iterator

from twinrun.foundation.redaction import cleaned
from twinrun.protocol.health import Health, NodeCheck
from twinrun.protocol.measurements import Check
from twinrun.results.judged import Judged
from twinrun.workloads.workload import MeasuredPoint

_ALLOCATION = "allocation"


def health_of(record: Judged) -> Health:
    """Return what a record of checks says of every node, and when its run began, as the run's name has it."""
    checks = [(point, check) for point in record.points for check in point.checks]
    found = tuple(one for point, check in checks for one in _of_nodes(point, check))
    began = datetime.datetime.fromtimestamp(0, datetime.UTC)
    with contextlib.suppress(ValueError):
        began = datetime.datetime.strptime(record.run[:15], "%Y%m%d-%H%M%S").replace(tzinfo=datetime.UTC)
    return Health(run=record.run, created=began.isoformat(timespec="seconds"), checks=found)


def _of_nodes(point: MeasuredPoint, check: Check) -> Iterator[NodeCheck]:
    """Yield a check for each node that it is about; one of several nodes fails at those that it names."""
    host, _, device = check.place.partition(", device ")
    made = functools.partial(NodeCheck, check=check.id)
    said = {"reason": check.reason, "remedy": check.remedy}
    told = functools.partial(made, outcome=check.outcome, **cleaned(said))
    if host != _ALLOCATION and not check.nodes:
        yield told(node=host, device=device)
        return
    for node in dict.fromkeys((*point.hosts, *check.nodes)):
        named = node in check.nodes or not check.nodes
        yield told(node=node) if named else made(node=node, outcome="pass", reason="")
