"""The account of a record: everything that was planned is there once, on the hardware that it names.

A record with a gap is read all the same; it carries no verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from twinrun.planning.project import Project
from twinrun.results.record import Record
from twinrun.workloads.account import Gap, at_point, held

__all__ = ["Gap", "gaps"]


def gaps(record: Record, project: Project) -> tuple[Gap, ...]:
    """Return what a record lacks, has twice, or says otherwise than it follows from its plan."""
    return (*_recipe(record, project), *_points(record), *_of_points(record))


def _recipe(record: Record, project: Project) -> Iterator[Gap]:
    """Yield where the plan is not one of its recipe."""
    yield from held("plan.workload", record.plan.workload, project.recipe(record.plan.recipe).workload)


def _points(record: Record) -> Iterator[Gap]:
    """Yield planned points that were not measured."""
    measured = Counter(point.id for point in record.points)
    for planned in record.plan.points:
        if not measured[planned.id]:
            yield Gap(
                point=planned.id,
                path=f"points.{planned.id}",
                found="absent",
                allowed="measured",
                hint="a point that failed says nothing; run it again",
            )
    yield from held(
        "points",
        [point.id for point in record.points],
        [one.id for one in record.plan.points if measured[one.id]],
    )


def _of_points(record: Record) -> Iterator[Gap]:
    planned = {point.id: point for point in record.plan.points}
    for point in record.points:
        yield from at_point(
            point.id, record.workload.account.as_planned(record.plan.part, planned[point.id], point)
        )
