"""The evidence of training: a curve that is finite, that fell, and that goes beyond the warm-up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from twinrun.manifests.claims import Claim
from twinrun.manifests.metrics import Metric
from twinrun.results.record import Record
from twinrun.results.verdicts import NotAskedError
from twinrun.workloads.curve_distance import values_of
from twinrun.workloads.workload import PointRecord


def demand_trained(points: Sequence[PointRecord], metrics: Mapping[str, Metric]) -> None:
    """Raise NotAskedError, whatever the claim, where a curve of the points says that training did nothing.

    The verdict is `failed` where training diverged.
    """
    for metric in metrics.values():
        if metric.evidence.kept_fall is None:
            continue
        for point in points:
            if curve := values_of(point, metric.id):
                _demand_fall(curve, metric, point.id)


def _demand_fall(curve: Sequence[float], metric: Metric, place: str) -> None:
    """Raise NotAskedError where a curve is not finite or ends no lower than it starts."""
    start, end = curve[0], curve[-1]
    for step, value in enumerate(curve, start=1):
        if not math.isfinite(value):
            raise NotAskedError(
                f"training diverged at {place}: the {metric.id} is {value:g} at step {step}",
                condition="stable",
            )
    if end > start * (1 + metric.evidence.most_rise):
        raise NotAskedError(
            f"training diverged at {place}: the {metric.id} rose from {start:.4g} to {end:.4g}",
            condition="stable",
        )
    if end >= start:
        raise NotAskedError(
            f"the {metric.id} at {place} ends at {end:.4g} and started at {start:.4g}: nothing was learned",
            condition="training",
        )


def untrained(curve: Sequence[float], metric: Metric, *, rising: int, place: str) -> str | None:
    """Return why a curve is none of a training, whatever it is held against, or None."""
    needed, kept = metric.evidence.trained_steps, metric.evidence.kept_fall or 0.0
    if len(curve) - rising < needed:
        return (
            f"{len(curve)} steps at {place}, of which the learning rate rises in the first {rising}, show no"
            f" curve; {needed} after them are needed"
        )
    start, end = curve[0], curve[-1]
    if not all(map(math.isfinite, curve)):
        return f"the {metric.id} at {place} is not finite"
    if start - end <= metric.evidence.least_fall * abs(start):
        return f"the {metric.id} at {place} ends at {end:.4g} and started at {start:.4g}: nothing was learned"
    if start - end < kept * (start - min(curve)):
        return f"the {metric.id} at {place} fell to {min(curve):.4g} and ends at {end:.4g}: it diverged"
    return None


def nothing_behind(claim: Claim, record: Record, points: Sequence[PointRecord], metric: Metric) -> str | None:
    """Return why curves that coincide show nothing, or None."""
    curves = [values_of(point, metric.id) for point in points]
    needed, described = metric.evidence.trained_steps, record.description.points
    rising = max(described[point.id].rising_steps for point in points)
    steps = min(len(curve) for curve in curves)
    if steps - rising < needed:
        return (
            f"{steps} steps, of which the learning rate rises in the first {rising}, show no curve;"
            f" {needed} after them are needed"
        )
    kept = metric.evidence.kept_fall or 0.0
    for point, curve in zip(points, curves, strict=True):
        if curve[0] - curve[-1] < kept * (curve[0] - min(curve)):
            return (
                f"the {metric.id} at {point.id} fell from {curve[0]:.4g} to {min(curve):.4g} and ends at"
                f" {curve[-1]:.4g}: it diverged"
            )
    fall = min((curve[0] - curve[-1]) / abs(curve[0]) if curve[0] else 0.0 for curve in curves)
    if fall <= claim.tolerance:
        return (
            f"the {claim.metric} fell by {fall:.2g} of its start, no more than the tolerance:"
            " nothing was learned"
        )
    return None
