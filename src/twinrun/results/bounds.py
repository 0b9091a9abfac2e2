"""What hardware and arithmetic allow: no number of a record lies outside, whatever claims ask.

Bounds are data: those of a device in images/gpus.toml, those of a metric in recipes/metrics.toml.
"""

from __future__ import annotations

from twinrun.planning.project import Project
from twinrun.results.evidence import beyond
from twinrun.results.record import Record
from twinrun.workloads.account import Gap

__all__ = ["excesses"]


def excesses(record: Record, project: Project) -> tuple[Gap, ...]:
    """Return the numbers of a record that lie outside of what its hardware can do."""
    found = []
    for point in record.points:
        for one in point.measurements:
            metric = project.metrics[one.metric]
            if over := beyond(metric.canonical(one.high, one.unit), metric, record.gpu, per=one.per):
                path = f"points.{point.id}.measurements.{one.id}"
                found.append(Gap(point=point.id, path=path, found=over, allowed="what it can be"))
    return tuple(found)
