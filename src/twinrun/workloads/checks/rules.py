"""What a point of checks must have: each planned check once at each of its places."""

from __future__ import annotations

from collections.abc import Iterator

from twinrun.protocol.checks import ChecksResult
from twinrun.workloads.checks.manifest import ChecksPlan, ChecksPoint, ChecksTables
from twinrun.workloads.workload import Finding, MeasuredPoint, held


def rules(
    _tables: ChecksTables, part: ChecksPlan, point: MeasuredPoint[ChecksPoint, ChecksResult]
) -> Iterator[Finding]:
    """Yield where the outcomes of a point are not those of the planned checks."""
    places = {
        "allocation": ["allocation"],
        "node": sorted(set(point.hosts)),
        "device": sorted(
            f"{host}, device {number}"
            for host in set(point.hosts)
            for number in range(point.planned.devices_per_node)
        ),
    }
    yield from held(
        "checks", list(dict.fromkeys(one.id for one in point.checks)), [one.id for one in part.checks]
    )
    for check in part.checks:
        found = sorted(one.place for one in point.checks if one.id == check.id)
        yield from held(f"the places of {check.id}", found, places[check.scope])
    for one in point.checks:
        if one.outcome == "pass" and (one.nodes or one.remedy):
            yield Finding(
                what=f"the outcome of {one.id}", found="passed, with a fault", allowed="one of them"
            )
