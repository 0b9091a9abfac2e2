"""What hardware and arithmetic allow: no number of a record lies outside, whatever claims ask.

Bounds are data: those of a device in images/gpus.toml, those of a metric in recipes/metrics.toml.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from twinrun.manifests.metrics import Metric
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.measurements import Measurement, Per, Series
from twinrun.results.judged import Judged
from twinrun.results.verdicts import NotAskedError
from twinrun.workloads.curve_distance import values_of
from twinrun.workloads.workload import Finding, MeasuredPoint, PointDescription

# A first loss over that of guessing, the logarithm of the vocabulary: 0.99 to 1.13 in every training here.
NEAR_CHANCE = (0.9, 1.25)
# A number that follows from others is as exact as they are.
ROUNDED = 1e-9


def excesses(found: Judged) -> Iterator[Finding]:
    """Yield the numbers of a record that lie outside of what its hardware can do, or of what they can be."""
    metrics = found.project.metrics
    apart: dict[str, tuple[float, list[float]]] = {}
    for point in found.points:
        described = found.description.points[point.id]
        gpu = None if described.leg and described.leg.processor else found.gpu
        for one in point.measurements:
            metric = metrics[one.metric]
            yield from _outside(one, metric, gpu, found)
            if metric.evidence.spread is not None:
                apart.setdefault(one.id, (metric.evidence.spread, []))[1].append(one.median)
        for series in point.series:
            yield from _losses(series, metrics[series.metric], point, described)
    for name, (spread, values) in apart.items():
        if max(values) > min(values) * (1 + spread):
            ends = f"{min(values):.4g} to {max(values):.4g} at its points"
            yield Finding(kind="bounds", what=name, found=ends, allowed=f"within {spread:.0%}")


def _outside(one: Measurement, metric: Metric, gpu: Gpu | None, found: Judged) -> Iterator[Finding]:
    """Yield that a number is more or less than there can be; it leaves nothing of its record."""
    low, high, median = (metric.canonical(value, one.unit) for value in (one.low, one.high, one.median))
    evidence, most = metric.evidence, limit_of(metric, gpu, per=one.per, labels=one.labels)
    least = evidence.least
    if least is not None and isinstance(evidence.most, str):
        least = None if most is None else least * most
    allowed, seen = "", f"{median:.4g} {metric.unit}"
    if low < 0:
        allowed = "from 0 on"
    elif over := beyond(high, metric, most):
        seen, allowed = over, "no more than that"
    elif least is not None and median < least:
        allowed = f"at least {least:.4g}"
    elif evidence.most == "resource" and gpu is not None and most is None:
        allowed = "of a resource whose rate a row of images/gpus.toml gives"
    elif evidence.most == "memory" and gpu is None:
        room = max((one.memory_bytes for one in found.record.allocation.reports.values()), default=math.inf)
        if median > (room := metric.canonical(room, "B")):
            allowed = f"up to {room:.4g}, which the host has"
    if allowed:
        yield Finding(kind="bounds", number=one.id, what=one.id, found=seen, allowed=allowed)


def limit_of(
    metric: Metric, gpu: Gpu | None, *, per: Per, labels: Mapping[str, str] | None = None
) -> float | None:
    """Return the most that a number of a metric can be, in its unit and without its error; None: no bound."""
    most, cards = metric.evidence.most, gpu.devices_per_card if gpu and per == "card" else 1
    if gpu is None or not isinstance(most, str):
        return None if isinstance(most, str) else most
    bandwidth = gpu.device_bandwidth_bytes_s / 1e9
    if (labels or {}).get(metric.evidence.unless or "", "none") != "none":
        most = "bandwidth"
    limits = {
        "peak": gpu.device_peak_flops / 1e12,
        "bandwidth": bandwidth,
        "link": gpu.link_gb_s or bandwidth,
        "power": gpu.power_w and gpu.power_w / gpu.devices_per_card,
        "memory": metric.canonical(gpu.device_memory_bytes, "B") if "B" in metric.units else None,
        "resource": gpu.rate_of((labels or {}).get("resource", "")),
    }
    found = limits[most]
    return None if found is None else cards * found


def beyond(value: float, metric: Metric, most: float | None) -> str | None:
    """Return that a value in its metric's unit is more than there can be, or None; it has an error."""
    if most is None or value <= most * (1 + metric.evidence.error) * (1 + ROUNDED):
        return None
    what = "the device can do" if isinstance(metric.evidence.most, str) else "there can be"
    return f"{value:.4g} {metric.unit}, more than the {most:.4g} that {what}"


def _losses(
    series: Series, metric: Metric, point: MeasuredPoint, described: PointDescription
) -> Iterator[Finding]:
    """Yield values of a curve that no loss has, and those that are far from guessing when it begins."""
    evidence, values, name = metric.evidence, series.values, metric.id
    if evidence.most_equal is None:
        return
    if not values or min(values) <= 0:
        lowest = min(values, default=None)
        yield Finding(kind="bounds", what=f"the lowest {name}", found=lowest, allowed="above 0")
        return
    most, (value, steps) = max(2, int(evidence.most_equal * len(values))), Counter(values).most_common(1)[0]
    if steps > most:
        allowed, found = f"at {most} at most: no two batches have one loss", f"at {steps} steps"
        yield Finding(kind="bounds", what=f"a {name} of {value!r}", found=found, allowed=allowed)
    if evidence.above_chance is None or described.vocabulary is None:
        return
    chance, settled = math.log(described.vocabulary), described.rising_steps + evidence.trained_steps
    low, high = (share * chance for share in NEAR_CHANCE)
    if not low <= values[0] <= high:
        allowed = f"from {low:.4g} to {high:.4g}, near guessing among {described.vocabulary:,} tokens"
        what = f"the first {name}"
        yield Finding(kind="bounds", point=point.id, what=what, found=values[0], allowed=allowed)
    lowest = values[0]
    for step, value in enumerate(values, start=1):
        # A loss that overshoots comes down within the steps that make a curve.
        over = chance * evidence.overshoot if step <= settled else 0.0
        lowest, allowed = min(lowest, value), ""
        if value > (limit := max(over, chance + evidence.above_chance)):
            allowed = f"up to {limit:.4g}"
        # A curve that has hardly fallen yet scatters by as much.
        fell = values[0] - lowest > evidence.most_rise * values[0]
        kept = (evidence.kept_fall or 0.0) * (values[0] - lowest)
        if not allowed and step > settled and fell and values[0] - value < kept:
            allowed = f"below what keeps its fall to {lowest:.4g}"
        if allowed:
            what = f"the {name} of step {step}"
            yield Finding(kind="bounds", point=point.id, what=what, found=value, allowed=allowed)
            return


def demand_trained(points: Sequence[MeasuredPoint], metrics: Mapping[str, Metric]) -> None:
    """Raise NotAskedError, whatever the claim, where a curve of the points says that training did nothing.

    The condition is `stable` where training diverged, else `training`.
    """
    curved = [metric for metric in metrics.values() if metric.evidence.kept_fall is not None]
    for metric, point in ((metric, point) for metric in curved for point in points):
        if not (curve := values_of(point, metric.id)):
            continue
        (start, end), seen = (curve[0], curve[-1]), ""
        if step := next((step for step, one in enumerate(curve, 1) if not math.isfinite(one)), None):
            seen = f"the {metric.id} is {curve[step - 1]:g} at step {step}"
        elif end > start * (1 + metric.evidence.most_rise):
            seen = f"the {metric.id} rose from {start:.4g} to {end:.4g}"
        if seen:
            raise NotAskedError(f"training diverged at {point.id}: {seen}", condition="stable")
        if end >= start:
            raise NotAskedError(_nothing(metric, point.id, start, end), condition="training")


def untrained(
    curve: Sequence[float], metric: Metric, *, rising: int, place: str, least_fall: float | None = None
) -> str | None:
    """Return why a curve is none of a training, whatever it is held against, or None.

    Args:
        rising: steps in which the learning rate rises.
        least_fall: share of its start by which it must fall; that of the metric where none is given.
    """
    evidence = metric.evidence
    if len(curve) - rising < evidence.trained_steps:
        return (
            f"{len(curve)} steps at {place}, of which the learning rate rises in the first {rising}, show no"
            f" curve; {evidence.trained_steps} after them are needed"
        )
    start, end, lowest = curve[0], curve[-1], min(curve)
    least = abs(start) * (evidence.least_fall if least_fall is None else least_fall)
    if not all(map(math.isfinite, curve)):
        return f"the {metric.id} at {place} is not finite"
    if least < start - lowest and start - end < (evidence.kept_fall or 0.0) * (start - lowest):
        fell = f"fell from {start:.4g} to {lowest:.4g} and ends at {end:.4g}"
        return f"the {metric.id} at {place} {fell}: it diverged"
    return _nothing(metric, place, start, end) if start - end <= least else None


def _nothing(metric: Metric, place: str, start: float, end: float) -> str:
    return f"the {metric.id} at {place} ends at {end:.4g} and started at {start:.4g}: nothing was learned"
