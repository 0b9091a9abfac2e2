"""Whether what was timed was right: errors, exactness and traffic within what the recipe allows."""

from __future__ import annotations

from collections.abc import Iterator

from twinrun.planning.project import Project
from twinrun.results.record import Record
from twinrun.workloads.account import Gap

__all__ = ["faults"]


def faults(record: Record, project: Project) -> tuple[Gap, ...]:
    """Return where the result of a call is absent, not finite, or further from right than is allowed."""
    return tuple(_faults(record, project))


def _faults(record: Record, project: Project) -> Iterator[Gap]:
    for point in record.points:
        for one in point.measurements:
            call, most = one.labels.get("call"), project.metrics[one.metric].evidence.most
            allowed = point.facts.get(f"{call} allowed error", most)
            if one.id == f"{call}/error" and isinstance(allowed, float) and not one.high <= allowed:
                path = f"points.{point.id}.measurements.{one.id}"
                yield Gap(point=point.id, path=path, found=f"{one.high:g}", allowed=f"at most {allowed:g}")
