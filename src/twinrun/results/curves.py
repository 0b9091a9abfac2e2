"""The evidence of training: a curve that is finite, that fell, and that goes beyond the warm-up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from twinrun.manifests.metrics import Metric
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


def untrained(
    curve: Sequence[float], metric: Metric, *, rising: int, place: str, least_fall: float | None = None
) -> str | None:
    """Return why a curve is none of a training, whatever it is held against, or None.

    Args:
        rising: steps in which the learning rate rises.
        least_fall: share of its start by which it must fall; that of the metric where none is given.
    """
    evidence = metric.evidence
    needed, kept = evidence.trained_steps, evidence.kept_fall or 0.0
    if len(curve) - rising < needed:
        return (
            f"{len(curve)} steps at {place}, of which the learning rate rises in the first {rising}, show no"
            f" curve; {needed} after them are needed"
        )
    start, end, lowest = curve[0], curve[-1], min(curve)
    least = abs(start) * (evidence.least_fall if least_fall is None else least_fall)
    if not all(map(math.isfinite, curve)):
        return f"the {metric.id} at {place} is not finite"
    if least < start - lowest and start - end < kept * (start - lowest):
        fell = f"fell from {start:.4g} to {lowest:.4g} and ends at {end:.4g}"
        return f"the {metric.id} at {place} {fell}: it diverged"
    if start - end <= least:
        return f"the {metric.id} at {place} ends at {end:.4g} and started at {start:.4g}: nothing was learned"
    return None
