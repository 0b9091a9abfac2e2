"""The evidence of training: a curve that is finite, that fell and kept its fall, beyond the warm-up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from twinrun.manifests.metrics import Metric
from twinrun.results.verdicts import NotAskedError
from twinrun.workloads.curve_distance import values_of
from twinrun.workloads.workload import MeasuredPoint, PointDescription


def settled_steps(metric: Metric, described: PointDescription) -> int:
    """Return the first steps of a training in which a curve may overshoot."""
    return described.rising_steps + metric.evidence.trained_steps


def unsettled(curve: Sequence[float], metric: Metric, settled: int) -> str:
    """Return the first value after `settled` steps that has lost too much of the fall of its curve."""
    evidence, start, lowest = metric.evidence, curve[0], curve[0]
    for step, value in enumerate(curve, start=1):
        lowest = min(lowest, value)
        # A curve that has hardly fallen yet scatters by as much.
        fell = start - lowest > evidence.most_rise * start
        if step > settled and fell and start - value < (evidence.kept_fall or 0.0) * (start - lowest):
            return f"{value:.4g} at step {step}, after {lowest:.4g}"
    return ""


def demand_trained(points: Sequence[MeasuredPoint], metrics: Mapping[str, Metric]) -> None:
    """Raise NotAskedError, whatever the claim, where a curve of the points says that training did nothing.

    The condition is `stable` where training diverged, else `training`.
    """
    for metric in (one for one in metrics.values() if one.evidence.kept_fall is not None):
        for point in points:
            if not (curve := values_of(point, metric.id)):
                continue
            start, end = curve[0], curve[-1]
            steps = (step for step, value in enumerate(curve, start=1) if not math.isfinite(value))
            if (step := next(steps, None)) is not None:
                seen = f"the {metric.id} is {curve[step - 1]:g} at step {step}"
                raise NotAskedError(f"training diverged at {point.id}: {seen}", condition="stable")
            if end > start * (1 + metric.evidence.most_rise):
                seen = f"the {metric.id} rose from {start:.4g} to {end:.4g}"
                raise NotAskedError(f"training diverged at {point.id}: {seen}", condition="stable")
            if end >= start:
                seen = f"ends at {end:.4g} and started at {start:.4g}: nothing was learned"
                raise NotAskedError(f"the {metric.id} at {point.id} {seen}", condition="training")


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
