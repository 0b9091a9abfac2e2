"""From what the script of a case reports to its numbers, and what it must have to be whole.

A call's measurements are named after it: `NAME` is our time, `NAME@BASELINE` that of a baseline,
`NAME/METRIC` and `NAME/METRIC@BASELINE` the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from twinrun.foundation.text import GIB, MIB
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.bench import (
    COPY,
    BenchResult,
    Call,
    CallLine,
    Implementation,
    largest_error,
    name_of,
)
from twinrun.protocol.measurements import BUS_BANDWIDTH, Measurement, Numbers, over_time, single
from twinrun.workloads.bench.manifest import BenchPlan, BenchPoint, BenchTables
from twinrun.workloads.settings import as_fingerprint, factor, flat
from twinrun.workloads.workload import (
    ComparisonTerms,
    Finding,
    MeasuredPoint,
    Point,
    Progress,
    held,
)

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
        name = f"peak-rate@{peak.resource}"
        found.append(single(name, peak.rate, unit, per="device", labels=labels))
    peaks = {one.resource: one.rate for one in result.peak_rates}
    return Numbers(measurements=(*found, *(one for call in result.calls for one in _of_call(call, peaks))))


def _of_call(call: Call, peaks: Mapping[str, float]) -> Iterator[Measurement]:
    """Yield the numbers of a call and of its baselines, and what ours is beside each."""
    name, ours = call.name, call.ours
    labels = _labels(call, ours)
    yield from _of_implementation(call, ours, "")
    time = _time(call, ours, "")
    for other in call.baselines:
        at = f"@{other.name}"
        yield from _of_implementation(call, other, at)
        beside = {**labels, "baseline": other.name}
        if time and (theirs := _time(call, other, at)):
            of = {"metric": "speedup", "unit": "ratio", "divisor": time.samples, "labels": beside}
            yield theirs.model_copy(update={"id": f"{name}/speedup{at}", **of})
        if ours.kept_bytes and other.kept_bytes is not None:
            saved = other.kept_bytes / ours.kept_bytes
            yield _number(f"{name}/memory-saving{at}", saved, "ratio", beside)
    if call.traffic:
        share = call.traffic.counted / call.traffic.expected
        yield _number(f"{name}/link-traffic", share, "ratio", labels).model_copy(update={"per": "link"})
    if time:
        yield from _rates(call, time, peaks)


def _of_implementation(call: Call, one: Implementation, at: str) -> Iterator[Measurement]:
    if time := _time(call, one, at):
        yield time
    _, error = largest_error(one.errors)
    if math.isfinite(error):
        yield _number(f"{call.name}/error{at}", error, "ratio", _labels(call, one))
    if one.kept_bytes is not None:
        yield _number(f"{call.name}/kept-memory{at}", one.kept_bytes / MIB, "MiB", _labels(call, one))


def _number(name: str, value: float, unit: str, labels: dict[str, str]) -> Measurement:
    """Return a number of a device, whose metric is what its name has after the call's."""
    metric = name.rpartition("/")[2].partition("@")[0]
    return single(name, value, unit, metric=metric, per="device", labels=labels)


def _labels(call: Call, one: Implementation) -> dict[str, str]:
    return {**call.labels, "call": call.name, "implementation": one.name}


def _time(call: Call, one: Implementation, at: str) -> Measurement | None:
    samples = one.milliseconds
    if not samples or min(samples) <= 0:
        return None
    of = {"metric": "time", "unit": "ms", "per": "device", "labels": _labels(call, one)}
    return Measurement.model_validate({"id": f"{call.name}{at}", "samples": samples, **of})


def _rates(call: Call, time: Measurement, peaks: Mapping[str, float]) -> Iterator[Measurement]:
    """Yield bandwidths of a call, and its least time by the roofline with how near it comes to that."""
    if bus := bus_bandwidth(call, time):
        yield bus
    amounts = {name: one for name, one in call.work.amounts.items() if one > 0} if call.work else {}
    if moved := amounts.get(COPY):
        name = f"{call.name}/bandwidth"
        bandwidth = over_time(moved / 1e6, time, id=name, metric="bandwidth", unit="GB/s")
        yield bandwidth
        if COPY in peaks:
            yield bandwidth.times(
                1e9 / peaks[COPY], id=f"{name}-share", metric="bandwidth-share", unit="ratio"
            )
    # The resource that takes longest at its peak rate sets the least time.
    bounds = [(amounts[name] / peak * 1e3, name) for name, peak in peaks.items() if name in amounts]
    if bounds:
        milliseconds, resource = max(bounds, key=lambda one: one[0])
        labels, name = {**time.labels, "resource": resource}, f"{call.name}/roofline"
        yield _number(f"{name}-time", milliseconds, "ms", labels)
        of = {"metric": "roofline-share", "unit": "ratio"}
        yield over_time(milliseconds, time, id=f"{name}-share", labels=labels, **of)


def bus_bandwidth(call: Call, time: Measurement) -> Measurement | None:
    """Return the bus bandwidth of a call or of its baseline, from its time; None where no link is counted."""
    if not call.bus_bytes:
        return None
    _, at, baseline = time.id.partition("@")
    name, of = f"{call.name}/bus-bandwidth{at}{baseline}", {"unit": "GB/s", "per": "link"}
    return over_time(call.bus_bytes / 1e6, time, id=name, metric="bus-bandwidth", formula=BUS_BANDWIDTH, **of)


def terms(part: BenchPlan, point: MeasuredPoint[BenchPoint, BenchResult]) -> ComparisonTerms:
    """Return what a case is compared by: what ran, its settings, and what its device can do."""
    calls = point.result.calls
    kernels = {f"{one.name} {one.version}" for call in calls for one in (call.ours, *call.baselines)}
    case = point.part.settings
    settings = {
        "kernels": ", ".join(sorted(kernels)),
        **{f"settings.{name}": str(value) for name, value in as_fingerprint(case).items()},
        **flat(part.bench, "bench."),
        # Three digits: the last ones of a measurement differ in every run.
        **{f"peak rate {one.resource}": f"{one.rate:.3g}/s" for one in point.result.peak_rates},
    }
    return ComparisonTerms(settings=settings)


def rules(
    tables: BenchTables, part: BenchPlan, point: MeasuredPoint[BenchPoint, BenchResult]
) -> Iterator[Finding]:
    """Yield where a case is not the planned one, or a result is further from right than is allowed."""
    calls, repeats = point.result.calls, part.bench.repeats
    seed = part.bench.seed
    yield from held("the seed", point.result.seed, point.result.seed if seed is None else seed)
    twice = [name for name, count in Counter(one.name for one in calls).items() if count > 1]
    yield from held("calls of one name", twice, [])
    if not calls:
        yield Finding(what="calls", found="none", allowed="those of the case")
    for call in calls:
        yield from held(f"the name of {call.name}", name_of(part.labels, call.labels), call.name)
        for one in (call.ours, *call.baselines):
            yield from held(f"timed calls of {call.name} by {one.name}", len(one.milliseconds), repeats)
        yield from _right(call, call.ours, tables.allowed_error(call.labels))
        # Errors of a baseline concern only the claims that are held against it.
        for one in call.baselines:
            yield from _right(call, one, tables.allowed_error(call.labels), baseline=True)


def _right(
    call: Call, one: Implementation, allowed: float | None, *, baseline: bool = False
) -> Iterator[Finding]:
    """Yield an error that is larger than the recipe allows, or that it does not say how large it may be."""
    tensor, error = largest_error(one.errors)
    number = f"{call.name}@{one.name}" if baseline else ""
    what = f"the error of {tensor} of {call.name} by {one.name}"
    if allowed is None:
        said = "within `allowed_errors` of recipe.toml, which says nothing of it"
        yield Finding(kind="correctness", number=number, what=what, found=error, allowed=said)
    elif not error <= allowed:
        yield Finding(kind="correctness", number=number, what=what, found=error, allowed=f"up to {allowed:g}")
