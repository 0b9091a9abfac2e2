"""From what the script of a case reports to the numbers of its record.

A call's measurements are named after it: `NAME` is our time, `NAME@BASELINE` that of a baseline,
`NAME/METRIC` and `NAME/METRIC@BASELINE` the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from twinrun.foundation.text import GIB, MIB
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.bench import COPY, BenchResult, Call, CallLine, Implementation, PeakRate, largest_error
from twinrun.protocol.formulas import BUS_BANDWIDTH
from twinrun.protocol.measurements import Fact, Measurement, Numbers, rate, sampled, scaled
from twinrun.workloads.bench.manifest import BenchPlan, BenchPoint
from twinrun.workloads.settings import factor, flat
from twinrun.workloads.workload import ComparisonTerms, Point, PointRecord, Premise, Progress

FACTORS = (
    factor("kernels", "large", "some", "other code, or another code object"),
    factor("settings.*", "large", "some", "another shape, or other inputs"),
    factor("bench.*", "some", "small", "what is timed, and how often"),
    factor("peak rate *", "some", "none", "clocks, power limits, another memory"),
)


def progress(line: bytes) -> Progress:
    """Read the line that a finished call writes."""
    call = CallLine.model_validate_json(line).call
    times = [(one.name, sorted(one.milliseconds)) for one in (call.ours, *call.baselines)]
    shown = [f"{name} {ms[len(ms) // 2]:.4g} ms" if ms else f"{name} checked" for name, ms in times]
    return Progress(done=0, status=f"{call.name}: {', '.join(shown)}")


def measured(_part: BenchPlan, _point: Point[BenchPoint], result: BenchResult) -> Numbers:
    """Return times, errors and memory of every call, and the peak rates of the device."""
    facts: dict[str, Fact] = {"seed": result.seed, "device name": result.device_name}
    found = [
        sampled(
            "peak-memory", [result.peak_memory_bytes / GIB], metric="peak-memory", unit="GiB", per="device"
        )
    ]
    for peak in result.peak_rates:
        facts[f"peak rate of {peak.resource}"] = peak.how
        found.append(peak_rate(peak))
    for call in result.calls:
        found += _call(call)
        facts |= _facts(call)
    return Numbers(measurements=tuple(found), facts=facts)


def peak_rate(peak: PeakRate) -> Measurement:
    """Return what the device does at most on one resource."""
    return sampled(
        f"peak-rate@{peak.resource}",
        [peak.rate],
        metric="peak-rate",
        unit="B/s" if peak.resource == COPY else "op/s",
        per="device",
        labels={"resource": peak.resource},
    )


def _call(call: Call) -> Iterator[Measurement]:
    yield from _implementation(call, call.ours, "")
    for baseline in call.baselines:
        yield from _implementation(call, baseline, f"@{baseline.name}")
        if call.ours.kept_bytes and baseline.kept_bytes is not None:
            yield _memory_saving(call, baseline.name, baseline.kept_bytes / call.ours.kept_bytes)
    if call.traffic:
        share, metric = call.traffic.counted / call.traffic.expected, "link-traffic"
        labels = {**call.labels, "call": call.name, "implementation": call.ours.name}
        yield sampled(
            f"{call.name}/{metric}", [share], metric=metric, unit="ratio", per="link", labels=labels
        )


def _memory_saving(call: Call, baseline: str, times: float) -> Measurement:
    name, metric = f"{call.name}/memory-saving@{baseline}", "memory-saving"
    labels = {**call.labels, "call": call.name, "implementation": call.ours.name, "baseline": baseline}
    return sampled(name, [times], metric=metric, unit="ratio", per="device", labels=labels)


def _implementation(call: Call, one: Implementation, suffix: str) -> Iterator[Measurement]:
    labels = {**call.labels, "call": call.name, "implementation": one.name}
    if one.milliseconds:
        name = f"{call.name}{suffix}"
        yield sampled(name, one.milliseconds, metric="time", unit="ms", per="device", labels=labels)
    _, error = largest_error(one.errors)
    if math.isfinite(error):
        name = f"{call.name}/error{suffix}"
        yield sampled(name, [error], metric="error", unit="ratio", per="device", labels=labels)
    if one.kept_bytes is not None:
        name, kept = f"{call.name}/kept-memory{suffix}", one.kept_bytes / MIB
        yield sampled(name, [kept], metric="kept-memory", unit="MiB", per="device", labels=labels)


def _facts(call: Call) -> dict[str, Fact]:
    facts: dict[str, Fact] = {
        f"{call.name} title": call.title,
        f"{call.name} allowed error": call.allowed_error,
    }
    if call.work:
        facts[f"{call.name} work formula"] = call.work.formula
        facts |= {f"{call.name} work {resource}": amount for resource, amount in call.work.amounts.items()}
    if call.bus_bytes is not None:
        facts[f"{call.name} bus bytes"] = call.bus_bytes
    if call.traffic:
        facts |= {
            f"{call.name} link bytes": call.traffic.counted,
            f"{call.name} link bytes expected": call.traffic.expected,
            f"{call.name} link formula": call.traffic.formula,
        }
    for one in (call.ours, *call.baselines):
        facts[f"version of {one.name}"] = one.version
        facts[f"{call.name} errors of {one.name}"] = ", ".join(
            f"{tensor} {'not finite' if error is None else format(error, '.3g')}"
            for tensor, error in one.errors.items()
        )
    return facts | {f"{call.name} without {name}": why for name, why in call.absent.items()}


def derived(_part: BenchPlan, point: PointRecord[BenchPoint], _gpu: Gpu | None) -> tuple[Measurement, ...]:
    """Return speedups, bandwidths and shares of what the device was measured to do."""
    # The account says whatever a record lacks.
    labelled = [one for one in point.measurements if {"call", "implementation"} <= one.labels.keys()]
    times = [one for one in labelled if one.metric == "time" and one.low > 0]
    ours = [one for one in times if one.id == one.labels["call"]]
    return tuple(found for one in ours for found in _derived(point, one, times))


def _derived(point: PointRecord, ours: Measurement, times: list[Measurement]) -> Iterator[Measurement]:
    name = ours.id
    for other in times:
        if other.labels["call"] == name and other.id != name:
            labels = {**ours.labels, "baseline": other.labels["implementation"]}
            yield _ratio(f"{name}/speedup@{labels['baseline']}", other, ours, labels)
    if bus := bus_bandwidth(point, ours):
        yield bus
    amounts, peaks = work_of(point, name), peaks_of(point)
    if moved := amounts.get(COPY):
        bandwidth = rate(
            ours, moved / 1e6, name=f"{name}/bandwidth", metric="bandwidth", unit="GB/s", per="device"
        )
        yield bandwidth
        if COPY in peaks:
            share, metric = 1e9 / peaks[COPY], "bandwidth-share"
            yield scaled(bandwidth, share, name=f"{name}/{metric}", metric=metric, unit="ratio", per="device")
    if bound := roofline_bound(amounts, peaks):
        milliseconds, resource = bound
        labels = {**ours.labels, "resource": resource}
        metric = "roofline-time"
        yield sampled(
            f"{name}/{metric}", [milliseconds], metric=metric, unit="ms", per="device", labels=labels
        )
        metric = "roofline-share"
        yield rate(
            ours,
            milliseconds,
            name=f"{name}/{metric}",
            metric=metric,
            unit="ratio",
            per="device",
            labels=labels,
        )


def bus_bandwidth(point: PointRecord, time: Measurement) -> Measurement | None:
    """Return the bus bandwidth of a call or of its baseline, from its time; None where no link is counted."""
    name, _, baseline = time.id.partition("@")
    bus_bytes = point.facts.get(f"{name} bus bytes")
    if not isinstance(bus_bytes, float) or bus_bytes <= 0:
        return None
    metric = "bus-bandwidth"
    return rate(
        time,
        bus_bytes / 1e6,
        name=f"{name}/{metric}" + (f"@{baseline}" if baseline else ""),
        metric=metric,
        unit="GB/s",
        per="link",
        formula=BUS_BANDWIDTH,
    )


def _ratio(name: str, over: Measurement, under: Measurement, labels: dict[str, str]) -> Measurement:
    """Return the ratio of two medians, with the extremes that their samples allow."""
    return Measurement(
        id=name,
        metric="speedup",
        unit="ratio",
        per="device",
        median=over.median / under.median,
        low=over.low / under.high,
        high=over.high / under.low,
        count=min(over.count, under.count),
        labels=labels,
    )


def work_of(point: PointRecord, call: str) -> dict[str, float]:
    """Return the least work of a call by resource."""
    prefix = f"{call} work "
    return {
        name.removeprefix(prefix): float(value)
        for name, value in point.facts.items()
        if name.startswith(prefix) and isinstance(value, (int, float)) and value > 0
    }


def peaks_of(point: PointRecord) -> dict[str, float]:
    """Return the peak rates of the device by resource, a second."""
    peaks = [one for one in point.measurements if one.metric == "peak-rate" and one.median > 0]
    return {one.labels["resource"]: one.median for one in peaks if "resource" in one.labels}


def roofline_bound(amounts: dict[str, float], peaks: dict[str, float]) -> tuple[float, str] | None:
    """Return the least milliseconds of `amounts` and the resource that sets them; None without peak rates."""
    times = {name: amounts[name] / peak * 1e3 for name, peak in peaks.items() if name in amounts}
    if not times:
        return None
    slowest = max(times, key=lambda name: times[name])
    return times[slowest], slowest


def terms(part: BenchPlan, point: PointRecord[BenchPoint]) -> ComparisonTerms:
    """Return what a case is compared by: what ran, its settings, and what its device can do."""
    kernels = {
        f"{name.removeprefix('version of ')} {value}"
        for name, value in point.facts.items()
        if name.startswith("version of ")
    }
    case = point.part.settings
    texts = {
        name: ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in case.items()
    }
    settings = {
        "kernels": ", ".join(sorted(kernels)),
        **{f"settings.{name}": value for name, value in texts.items()},
        **{f"bench.{name}": value for name, value in flat(part.bench).items()},
        # Three digits: the last ones of a measurement differ in every run.
        **{f"peak rate {name}": f"{value:.3g}/s" for name, value in peaks_of(point).items()},
    }
    return ComparisonTerms(
        settings=settings, premises=(Premise(values=case, otherwise="other settings of the case"),)
    )
