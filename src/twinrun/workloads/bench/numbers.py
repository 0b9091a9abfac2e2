"""From what the script of a case reports to its numbers, and what it must have to be whole.

A call's measurements are named after it: `NAME` is our time, `NAME@BASELINE` that of a baseline,
`NAME/METRIC` and `NAME/METRIC@BASELINE` the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from twinrun.foundation.text import GIB, MIB
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.bench import COPY, BenchResult, Call, CallLine, Implementation, largest_error, name_of
from twinrun.protocol.measurements import BUS_BANDWIDTH, Measurement, Numbers, over_time, single
from twinrun.workloads.bench.plan import BenchPlan, BenchPoint, BenchTables
from twinrun.workloads.settings import as_fingerprint, factor, flat
from twinrun.workloads.workload import ComparisonTerms, Finding, MeasuredPoint, Point, Progress, held

CasePoint = MeasuredPoint[BenchPoint, BenchResult]
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


def numbers(_part: BenchPlan, _point: Point[BenchPoint], result: BenchResult, _gpu: Gpu | None) -> Numbers:
    """Return times, errors and memory of every call, what follows from them, and the device's peak rates."""
    found = [single("peak-memory", result.peak_memory_bytes / GIB, "GiB", per="device")]
    for peak in result.peak_rates:
        unit, labels = "B/s" if peak.resource == COPY else "op/s", {"resource": peak.resource}
        found.append(single(f"peak-rate@{peak.resource}", peak.rate, unit, per="device", labels=labels))
    peaks = {one.resource: one.rate for one in result.peak_rates}
    return Numbers(measurements=(*found, *(one for call in result.calls for one in _of_call(call, peaks))))


def _of_call(call: Call, peaks: Mapping[str, float]) -> Iterator[Measurement]:
    """Yield the numbers of a call and of its baselines, and what ours is beside each."""
    name, ours, labels, time = call.name, call.ours, _labels(call, call.ours), _time(call, call.ours)
    yield from _of_implementation(call, ours)
    for other in call.baselines:
        yield from _of_implementation(call, other)
        beside: dict[str, Any] = {"per": "device", "labels": {**labels, "baseline": other.name}}
        if time and (theirs := _time(call, other)):
            of = {"metric": "speedup", "unit": "ratio", "divisor": time.samples, **beside}
            yield theirs.model_copy(update={"id": f"{name}/speedup@{other.name}", **of})
        if ours.kept_bytes and other.kept_bytes is not None:
            saved = other.kept_bytes / ours.kept_bytes
            yield single(f"{name}/memory-saving@{other.name}", saved, "ratio", **beside)
    if call.traffic:
        share = call.traffic.counted / call.traffic.expected
        yield single(f"{name}/link-traffic", share, "ratio", per="link", labels=labels)
    amounts = {name: one for name, one in call.work.amounts.items() if one > 0} if call.work else {}
    if time:
        yield from _rates(time, amounts, peaks)


def _of_implementation(call: Call, one: Implementation) -> Iterator[Measurement]:
    """Yield times, bandwidth over links, errors and memory of one implementation of a call."""
    name, at = call.name, _at(call, one)
    of: dict[str, Any] = {"per": "device", "labels": _labels(call, one)}
    if time := _time(call, one):
        yield time
        if call.bus_bytes:
            bus = {"metric": "bus-bandwidth", "unit": "GB/s", "per": "link", "formula": BUS_BANDWIDTH}
            yield over_time(call.bus_bytes / 1e6, time, id=f"{name}/bus-bandwidth{at}", **bus)
    if math.isfinite(error := largest_error(one.errors)[1]):
        yield single(f"{name}/error{at}", error, "ratio", **of)
    if one.kept_bytes is not None:
        yield single(f"{name}/kept-memory{at}", one.kept_bytes / MIB, "MiB", **of)


def _at(call: Call, one: Implementation) -> str:
    return "" if one is call.ours else f"@{one.name}"


def _labels(call: Call, one: Implementation) -> dict[str, str]:
    return {**call.labels, "call": call.name, "implementation": one.name}


def _time(call: Call, one: Implementation) -> Measurement | None:
    name, samples, labels = f"{call.name}{_at(call, one)}", one.milliseconds, _labels(call, one)
    of = {"metric": "time", "unit": "ms", "per": "device", "labels": labels}
    return Measurement.model_validate({"id": name, "samples": samples, **of}) if samples else None


def _rates(
    time: Measurement, amounts: Mapping[str, float], peaks: Mapping[str, float]
) -> Iterator[Measurement]:
    """Yield the bandwidth of a call, and its least time by the roofline with how near it comes to that."""
    if moved := amounts.get(COPY):
        name = f"{time.id}/bandwidth"
        bandwidth = over_time(moved / 1e6, time, id=name, metric="bandwidth", unit="GB/s")
        yield bandwidth
        if COPY in peaks:
            of = {"metric": "bandwidth-share", "unit": "ratio"}
            yield bandwidth.times(1e9 / peaks[COPY], id=f"{name}-share", **of)
    # The resource that takes longest at its peak rate sets the least time.
    bounds = [(amounts[name] / peak * 1e3, name) for name, peak in peaks.items() if name in amounts]
    for milliseconds, resource in sorted(bounds, reverse=True)[:1]:
        name, labels = f"{time.id}/roofline", {**time.labels, "resource": resource}
        yield single(f"{name}-time", milliseconds, "ms", per="device", labels=labels)
        of = {"metric": "roofline-share", "unit": "ratio"}
        yield over_time(milliseconds, time, id=f"{name}-share", labels=labels, **of)


def terms(part: BenchPlan, point: CasePoint) -> ComparisonTerms:
    """Return what a case is compared by: what ran, its settings, and what its device can do."""
    made = (one for call in point.result.calls for one in (call.ours, *call.baselines))
    settings = {
        "kernels": ", ".join(sorted({f"{one.name} {one.version}" for one in made})),
        **{f"settings.{name}": str(value) for name, value in as_fingerprint(point.part.settings).items()},
        **flat(part.bench, "bench."),
        # Three digits: the last ones of a measurement differ in every run.
        **{f"peak rate {one.resource}": f"{one.rate:.3g}/s" for one in point.result.peak_rates},
    }
    return ComparisonTerms(settings=settings)


def rules(tables: BenchTables, part: BenchPlan, point: CasePoint) -> Iterator[Finding]:
    """Yield where a case is not the planned one, or a result is further from right than is allowed."""
    calls, seed = point.result.calls, point.result.seed
    yield from held("the seed", seed, seed if part.bench.seed is None else part.bench.seed)
    twice = [name for name, count in Counter(one.name for one in calls).items() if count > 1]
    yield from held("calls of one name", twice, [])
    if not calls:
        yield Finding(what="calls", found="none", allowed="those of the case")
    for call in calls:
        yield from held(f"the name of {call.name}", name_of(part.labels, call.labels), call.name)
        for one in (call.ours, *call.baselines):
            timed = f"timed calls of {call.name} by {one.name}"
            yield from held(timed, len(one.milliseconds), part.bench.repeats)
            yield from _right(call, one, tables.allowed_error(call.labels))


def _right(call: Call, one: Implementation, allowed: float | None) -> Iterator[Finding]:
    """Yield an error that is larger than the recipe allows, or that it does not say how large it may be."""
    tensor, error = largest_error(one.errors)
    if allowed is not None and error <= allowed:
        return
    yield Finding(
        kind="correctness",
        # Errors of a baseline concern only the claims that are held against it.
        number=f"{call.name}@{one.name}" if one is not call.ours else "",
        what=f"the error of {tensor} of {call.name} by {one.name}",
        found=error,
        allowed=f"up to {allowed:g}" if allowed else "within `allowed_errors`, which say nothing of it",
    )
