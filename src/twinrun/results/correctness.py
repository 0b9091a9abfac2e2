"""Whether what was timed was right: errors, exactness and traffic within what the recipe allows.

No speed counts beside a wrong result, so that a fault of a call concerns every claim about its point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement
from twinrun.results.record import Record
from twinrun.workloads.account import NOT_COLLECTED, at_point
from twinrun.workloads.workload import Gap, PointRecord, Workload

__all__ = ["faults"]

ERROR = "error"


def faults(record: Record, project: Project) -> tuple[Gap, ...]:
    """Return where the result of a call is absent, not finite, or further from right than is allowed.

    The allowance is the recipe's; what a record says of it must be the same.
    """
    tables = project.recipe(record.plan.recipe).tables
    return tuple(
        gap
        for point in record.points
        for gap in at_point(point.id, _of_point(record.workload, point, tables))
    )


def _of_point(workload: Workload, point: PointRecord, tables: object) -> Iterator[Gap]:
    account = workload.account
    for call, labels in account.calls(point).items():
        allowed = account.allowed_error(tables, labels)
        yield from _fault(point, call, allowed)
        # Errors of a baseline concern only the claims that are held against it.
        held = {one.labels.get("baseline") for one in point.measurements if one.labels.get("call") == call}
        for baseline in sorted(filter(None, held)):
            yield from _within(point, f"{call}/{ERROR}@{baseline}", allowed or 0.0)


def _fault(point: PointRecord, call: str, allowed: float | None) -> Iterator[Gap]:
    name = f"{call}/{ERROR}"
    if allowed is None:
        hint = "`allowed_errors` of recipe.toml says how far a call may be from its reference"
        path = f"measurements.{name}"
        yield Gap(path=path, found="without an allowance", allowed="with one of the recipe", hint=hint)
        return
    fact = f"{call} allowed error"
    if (said := point.facts.get(fact)) != allowed:
        yield Gap(path=f"facts.{fact}", found=str(said), allowed=f"{allowed:g}, the recipe's")
    yield from _within(point, name, allowed)


def _within(point: PointRecord, name: str, allowed: float) -> Iterator[Gap]:
    path, found = f"measurements.{name}", point.measurement(name)
    if found is None:
        yield Gap(path=path, found="absent", allowed=f"up to {allowed:g}", hint=NOT_COLLECTED)
    elif _wrong(found, allowed):
        yield Gap(path=path, found=f"{found.high:g}", allowed=f"up to {allowed:g}")


def _wrong(found: Measurement, allowed: float) -> bool:
    return not all(map(math.isfinite, (found.low, found.high))) or not 0 <= found.low <= found.high <= allowed
