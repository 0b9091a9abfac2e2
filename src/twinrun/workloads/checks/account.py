"""What a point of checks must have: each planned check once at each of its places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from twinrun.workloads.account import TEXT, Account, Gap, facts_held, held, series_held
from twinrun.workloads.checks.manifest import ChecksPlan, ChecksPoint
from twinrun.workloads.workload import Point, PointRecord


def as_planned(
    part: ChecksPlan, planned: Point[ChecksPoint], point: PointRecord[ChecksPoint]
) -> Iterator[Gap]:
    """Yield where the outcomes of a point are not those of the planned checks."""
    places = {"allocation": 1, "node": planned.nodes, "device": planned.world_size}
    found = Counter(one.id for one in point.checks)
    for check in part.checks:
        yield from held(f"checks.{check.id}", found[check.id], places[check.scope], "outcomes of the check")
    for name in sorted(found.keys() - {one.id for one in part.checks}):
        yield Gap(path=f"checks.{name}", found="there", allowed="a check of the plan")
    twice = [key for key, count in Counter((one.id, one.place) for one in point.checks).items() if count > 1]
    for name, place in twice:
        yield Gap(path=f"checks.{name}", found=f"twice at {place}", allowed="once at each place")
    yield from series_held(point, {})
    yield from facts_held(point, {"device name": TEXT})
    yield from held("attempts", point.attempts, ())


ACCOUNT = Account(measured={}, as_planned=as_planned)
