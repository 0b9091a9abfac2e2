"""What a point of checks must have: each planned check once at each of its places."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from twinrun.workloads.account import TEXT, facts_held, held, series_held
from twinrun.workloads.checks.manifest import ChecksPlan, ChecksPoint, ChecksTables
from twinrun.workloads.workload import Account, Gap, Point, PointRecord


def as_planned(
    part: ChecksPlan, planned: Point[ChecksPoint], point: PointRecord[ChecksPoint]
) -> Iterator[Gap]:
    """Yield where the outcomes of a point are not those of the planned checks."""
    known = {one.id for one in part.checks}
    for name in sorted({one.id for one in point.checks} - known):
        yield Gap(path=f"checks.{name}", found="there", allowed="a check of the plan")
    hosts = point.hosts
    ranks = planned.world_size // planned.nodes
    named = {
        "allocation": {"allocation"},
        "node": set(hosts),
        "device": {f"{host}, device {number}" for host in hosts for number in range(ranks)},
    }
    for check in part.checks:
        places = sorted(one.place for one in point.checks if one.id == check.id)
        yield from held(f"checks.{check.id}.place", places, sorted(named[check.scope]))
    for one in point.checks:
        if one.outcome == "pass" and (one.nodes or one.remedy):
            yield Gap(path=f"checks.{one.id}", found="passed, with a fault", allowed="one of them")
        if one.seconds is not None and not 0 <= one.seconds < math.inf:
            yield Gap(
                path=f"checks.{one.id}.seconds", found=f"{one.seconds:g}", allowed="0 or more, and finite"
            )
    yield from series_held(point, {})
    yield from facts_held(point, {"device name": TEXT})
    yield from held("attempts", point.attempts, ())


def of_recipe(tables: ChecksTables, part: ChecksPlan, points: Sequence[Point[ChecksPoint]]) -> Iterator[Gap]:
    """Yield checks that the recipe has not, or has otherwise, or has once."""
    known = {one.id: one for one in tables.checks.check}
    yield from held("plan.points", len(points) > 0, True)
    found = [one.id for one in part.checks]
    yield from held("plan.part.checks", found, [name for name in known if name in found])
    for one in part.checks:
        yield from held(f"plan.part.checks.{one.id}", one, known.get(one.id))


ACCOUNT = Account(measured={}, as_planned=as_planned, of_recipe=of_recipe)
