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
from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement, Per, Series
from twinrun.results.record import Record
from twinrun.workloads.workload import Gap, PointDescription, PointRecord

__all__ = ["beyond", "excesses", "limit_of"]

RESOURCE = "resource"
NO_LABELS: Mapping[str, str] = MappingProxyType({})
# A number that follows from others is as exact as they are.
ROUNDED = 1e-9


def excesses(record: Record, project: Project) -> tuple[Gap, ...]:
    """Return the numbers of a record that lie outside of what its hardware can do, or of what they can be."""
    # The row as it stands: records from before a bound was held do not have it.
    gpu = project.gpus.get(record.plan.gpu) if record.plan.gpu else None
    found = []
    for point in record.points:
        described = record.description.points[point.id]
        on = None if described.leg and described.leg.processor else gpu
        # A number that there cannot be leaves nothing of its record; a curve tells of its own training.
        for of, outside in (
            ("", _of_measurements(record, project.metrics, point, on)),
            ("", _no_losses(project.metrics, point)),
            (point.id, _of_curves(project.metrics, point, described)),
        ):
            found += [
                Gap(point=of, path=f"points.{point.id}.{path}", found=value, allowed=allowed)
                for path, value, allowed in outside
            ]
    return (*found, *_apart(record, project.metrics))


def _apart(record: Record, metrics: Mapping[str, Metric]) -> Iterator[Gap]:
    """Yield what is of the device, and further apart at two points than it can be measured to be."""
    found: dict[str, list[float]] = {}
    spreads: dict[str, float] = {}
    for one in (one for point in record.points for one in point.measurements):
        if (spread := metrics[one.metric].evidence.spread) is not None:
            spreads[one.id] = spread
            found.setdefault(one.id, []).append(one.median)
    for name, values in found.items():
        if max(values) > min(values) * (1 + spreads[name]):
            said = f"{min(values):.4g} to {max(values):.4g} at its points"
            yield Gap(path=f"measurements.{name}", found=said, allowed=f"within {spreads[name]:.0%}")


Outside = tuple[str, str, str]
"""A leaf below its point, what it is, and what it may be."""


def _of_measurements(
    record: Record, metrics: Mapping[str, Metric], point: PointRecord, gpu: Gpu | None
) -> Iterator[Outside]:
    for one in point.measurements:
        yield from _outside(one, metrics[one.metric], gpu, record)


def _no_losses(metrics: Mapping[str, Metric], point: PointRecord) -> Iterator[Outside]:
    """Yield the first value of a curve that no loss has, and the one that it has at too many of its steps."""
    for series in point.series:
        path, share = f"series.{series.id}.values", metrics[series.metric].evidence.most_equal
        if share is None:
            continue
        for step, value in enumerate(series.values):
            if not math.isfinite(value) or value <= 0:
                yield f"{path}.{step}", f"{value:g}", "above 0, and finite"
                break
        most = max(2, int(share * len(series.values)))
        for value, steps in Counter(series.values).most_common(1):
            if steps > most:
                yield path, f"{value!r} at {steps} steps", f"at {most} at most: no two batches have one loss"


def _of_curves(
    metrics: Mapping[str, Metric], point: PointRecord, described: PointDescription
) -> Iterator[Outside]:
    for series in point.series:
        yield from _chance(series, metrics[series.metric], described)


def _outside(one: Measurement, metric: Metric, gpu: Gpu | None, record: Record) -> Iterator[Outside]:
    path = f"measurements.{one.id}"
    low, high = (metric.canonical(value, one.unit) for value in (one.low, one.high))
    median = metric.canonical(one.median, one.unit)
    evidence = metric.evidence
    if not all(map(math.isfinite, (low, median, high))) or low < 0:
        yield path, f"{low:g} to {high:g}", "finite numbers from 0 on"
        return
    if over := beyond(high, metric, gpu, per=one.per, labels=one.labels):
        yield path, over, "no more than that"
    most = limit_of(metric, gpu, per=one.per, labels=one.labels)
    least = evidence.least
    if least is not None and isinstance(evidence.most, str):
        least = None if most is None else least * most
    if least is not None and median < least:
        yield path, f"{median:.4g} {metric.unit}", f"at least {least:.4g}"
    if evidence.most == "resource" and gpu is not None and most is None:
        yield (
            path,
            one.labels.get(RESOURCE, "absent"),
            "a resource whose rate a row of images/gpus.toml gives",
        )
    if evidence.most == "memory" and gpu is None:
        room = max(record.machine.memory_bytes, *_memories(record)) / metric_bytes(metric)
        if median > room:
            yield path, f"{median:.4g} {metric.unit}", f"up to {room:.4g}, which the host has"


def _memories(record: Record) -> tuple[int, ...]:
    reports = record.allocation.reports.values() if record.allocation else ()
    return (0, *(one.memory_bytes for one in reports))


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


def _chance(series: Series, metric: Metric, described: PointDescription) -> Iterator[Outside]:
    """Yield the first loss of a curve that is far above that of guessing."""
    evidence, vocabulary = metric.evidence, described.vocabulary
    if evidence.above_chance is None or vocabulary is None:
        return
    chance = math.log(vocabulary)
    # A loss that overshoots comes down within the steps that make a curve.
    settled = described.rising_steps + evidence.trained_steps
    for step, value in enumerate(series.values, start=1):
        most = chance + evidence.above_chance
        if step <= settled:
            most = max(most, chance * evidence.overshoot)
        if not value <= most:
            allowed = f"up to {most:.4g}, of {vocabulary:,} tokens"
            yield f"series.{series.id}.values.{step - 1}", f"{value:.4g} {metric.unit}", allowed
            return
    yield from _rise(series, metric, settled)


def _rise(series: Series, metric: Metric, settled: int) -> Iterator[Outside]:
    """Yield the first value at which a curve has lost more of its fall than training loses."""
    kept, start, lowest = metric.evidence.kept_fall, series.values[0], series.values[0]
    if kept is None:
        return
    for step, value in enumerate(series.values, start=1):
        lowest = min(lowest, value)
        most = start - kept * (start - lowest)
        # A curve that has hardly fallen yet scatters by as much.
        fell = start - lowest > metric.evidence.most_rise * start
        if step > settled and fell and value > most:
            path = f"series.{series.id}.values.{step - 1}"
            yield path, f"{value:.4g} {metric.unit} after {lowest:.4g}", f"up to {most:.4g}"
            return
