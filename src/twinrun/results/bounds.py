"""What hardware and arithmetic allow: no number of a record lies outside, whatever claims ask.

Bounds are data: those of a device in images/gpus.toml, those of a metric in recipes/metrics.toml.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from twinrun.manifests.metrics import Metric
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.measurements import Measurement, Per, Series
from twinrun.results.curves import settled_steps, unsettled
from twinrun.results.judged import Judged
from twinrun.workloads.workload import Finding, MeasuredPoint, PointDescription

RESOURCE = "resource"
NO_LABELS: Mapping[str, str] = MappingProxyType({})
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
    elif over := beyond(high, metric, gpu, per=one.per, labels=one.labels):
        seen, allowed = over, "no more than that"
    elif least is not None and median < least:
        allowed = f"at least {least:.4g}"
    elif evidence.most == "resource" and gpu is not None and most is None:
        allowed = "of a resource whose rate a row of images/gpus.toml gives"
    elif evidence.most == "memory" and gpu is None:
        room = max((one.memory_bytes for one in found.record.allocation.reports.values()), default=math.inf)
        if median * metric_bytes(metric) > room:
            allowed = f"up to {room / metric_bytes(metric):.4g}, which the host has"
    if allowed:
        yield Finding(kind="bounds", number=one.id, what=one.id, found=seen, allowed=allowed)


def metric_bytes(metric: Metric) -> float:
    """Return the bytes of one canonical unit of a metric of memory."""
    return 1 / metric.units["B"]


def limit_of(
    metric: Metric, gpu: Gpu | None, *, per: Per, labels: Mapping[str, str] = NO_LABELS
) -> float | None:
    """Return the most that a number of a metric can be, in its unit and without its error; None: no bound."""
    most, cards = metric.evidence.most, gpu.devices_per_card if gpu and per == "card" else 1
    if not isinstance(most, str):
        return most
    if gpu is None:
        return None
    bandwidth = gpu.device_bandwidth_bytes_s / 1e9
    if labels.get(metric.evidence.unless or "", "none") != "none":
        most = "bandwidth"
    limits = {
        "peak": gpu.device_peak_flops / 1e12,
        "bandwidth": bandwidth,
        "link": gpu.link_gb_s or bandwidth,
        "power": gpu.power_w and gpu.power_w / gpu.devices_per_card,
        "memory": gpu.device_memory_bytes / metric_bytes(metric) if "B" in metric.units else None,
        "resource": gpu.rate_of(labels.get(RESOURCE, "")),
    }
    found = limits[most]
    return None if found is None else cards * found


def beyond(
    value: float, metric: Metric, gpu: Gpu | None, *, per: Per, labels: Mapping[str, str] = NO_LABELS
) -> str | None:
    """Return that a value in its metric's unit is more than its evidence allows, or None."""
    most = limit_of(metric, gpu, per=per, labels=labels)
    if most is None or value <= most * (1 + metric.evidence.error) * (1 + ROUNDED):
        return None
    what = "the device can do" if isinstance(metric.evidence.most, str) else "there can be"
    return f"{value:.4g} {metric.unit}, more than the {most:.4g} that {what}"


def _losses(
    series: Series, metric: Metric, point: MeasuredPoint, described: PointDescription
) -> Iterator[Finding]:
    """Yield values of a curve that no loss has, and those that are far from guessing when it begins."""
    evidence, values = metric.evidence, series.values
    if evidence.most_equal is None:
        return
    if not values or min(values) <= 0:
        yield Finding(
            kind="bounds", what=f"the lowest {metric.id}", found=min(values, default=None), allowed="above 0"
        )
        return
    most = max(2, int(evidence.most_equal * len(values)))
    value, steps = Counter(values).most_common(1)[0]
    if steps > most:
        allowed = f"at {most} at most: no two batches have one loss"
        yield Finding(
            kind="bounds", what=f"a {metric.id} of {value!r}", found=f"at {steps} steps", allowed=allowed
        )
    if evidence.above_chance is None or described.vocabulary is None:
        return
    chance, settled = math.log(described.vocabulary), settled_steps(metric, described)
    low, high = (share * chance for share in NEAR_CHANCE)
    if not low <= values[0] <= high:
        allowed = f"from {low:.4g} to {high:.4g}, near guessing among {described.vocabulary:,} tokens"
        yield Finding(
            kind="bounds", point=point.id, what=f"the first {metric.id}", found=values[0], allowed=allowed
        )
    for step, value in enumerate(values, start=1):
        # A loss that overshoots comes down within the steps that make a curve.
        over = chance * evidence.overshoot if step <= settled else 0.0
        if value > (limit := max(over, chance + evidence.above_chance)):
            what = f"the {metric.id} of step {step}"
            yield Finding(kind="bounds", point=point.id, what=what, found=value, allowed=f"up to {limit:.4g}")
            return
    if why := unsettled(values, metric, settled):
        what, allowed = f"the {metric.id}", "one that keeps what it fell by"
        yield Finding(kind="bounds", point=point.id, what=what, found=why, allowed=allowed)
