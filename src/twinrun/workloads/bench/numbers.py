"""From what the script of a case reports to the numbers of its record.

A call's measurements are named after it: `NAME` is our time, `NAME@BASELINE` that of a baseline,
`NAME/METRIC` and `NAME/METRIC@BASELINE` the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from twinrun.foundation.text import GIB, MIB
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.bench import COPY, BenchResult, Call, CallLine, Implementation, largest_error
from twinrun.protocol.measurements import BUS_BANDWIDTH, Measurement, Numbers, over_time, single
from twinrun.workloads.bench.manifest import BenchPlan, BenchPoint
from twinrun.workloads.settings import factor, flat
from twinrun.workloads.workload import ComparisonTerms, MeasuredPoint, Point, Progress

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
    return Numbers(
        measurements=(*found, *(one for call in result.calls for one in _of_call(call, peaks))),
    )


def _of_call(call: Call, peaks: Mapping[str, float]) -> Iterator[Measurement]:
    """Yield the numbers of a call and of its baselines, and what ours is beside each."""
    name = call.name
    labels = {**call.labels, "call": name, "implementation": call.ours.name}
    time, kept = _time(call, call.ours, ""), call.ours.kept_bytes
    yield from _of_implementation(call, call.ours, "")
    for other in call.baselines:
        yield from _of_implementation(call, other, f"@{other.name}")
        beside = {**labels, "baseline": other.name}
        theirs = _time(call, other, f"@{other.name}")
        if time and theirs:
            yield theirs.model_copy(
                update={
                    "id": f"{name}/speedup@{other.name}",
                    "metric": "speedup",
                    "unit": "ratio",
                    "divisor": time.samples,
                    "labels": beside,
                }
            )
        if kept and other.kept_bytes is not None:
            number, saved = f"{name}/memory-saving@{other.name}", other.kept_bytes / kept
            yield single(number, saved, "ratio", metric="memory-saving", per="device", labels=beside)
    if call.traffic:
        share = call.traffic.counted / call.traffic.expected
        yield single(f"{name}/link-traffic", share, "ratio", metric="link-traffic", per="link", labels=labels)
    if time:
        yield from _rates(call, time, peaks)


def _of_implementation(call: Call, one: Implementation, suffix: str) -> Iterator[Measurement]:
    labels = {**call.labels, "call": call.name, "implementation": one.name}
    if time := _time(call, one, suffix):
        yield time
    _, error = largest_error(one.errors)
    if math.isfinite(error):
        yield single(
            f"{call.name}/error{suffix}", error, "ratio", metric="error", per="device", labels=labels
        )
    if one.kept_bytes is not None:
        number, kept = f"{call.name}/kept-memory{suffix}", one.kept_bytes / MIB
        yield single(number, kept, "MiB", metric="kept-memory", per="device", labels=labels)


def _time(call: Call, one: Implementation, suffix: str) -> Measurement | None:
    if not one.milliseconds or min(one.milliseconds) <= 0:
        return None
    labels = {**call.labels, "call": call.name, "implementation": one.name}
    name = f"{call.name}{suffix}"
    return Measurement(
        id=name, metric="time", unit="ms", per="device", samples=one.milliseconds, labels=labels
    )


def _rates(call: Call, time: Measurement, peaks: Mapping[str, float]) -> Iterator[Measurement]:
    """Yield bandwidths of a call, and its least time by the roofline with how near it comes to that."""
    if bus := bus_bandwidth(call, time):
        yield bus
    amounts = work_of(call)
    if moved := amounts.get(COPY):
        name = f"{call.name}/bandwidth"
        bandwidth = over_time(moved / 1e6, time, id=name, metric="bandwidth", unit="GB/s")
        yield bandwidth
        if COPY in peaks:
            of = {"metric": "bandwidth-share", "unit": "ratio"}
            yield bandwidth.times(1e9 / peaks[COPY], id=f"{call.name}/bandwidth-share", **of)
    if bound := roofline_bound(amounts, peaks):
        milliseconds, resource = bound
        labels, name = {**time.labels, "resource": resource}, f"{call.name}/roofline"
        yield single(f"{name}-time", milliseconds, "ms", metric="roofline-time", per="device", labels=labels)
        of = {"metric": "roofline-share", "unit": "ratio"}
        yield over_time(milliseconds, time, id=f"{name}-share", labels=labels, **of)


def bus_bandwidth(call: Call, time: Measurement) -> Measurement | None:
    """Return the bus bandwidth of a call or of its baseline, from its time; None where no link is counted."""
    if not call.bus_bytes:
        return None
    _, at, baseline = time.id.partition("@")
    name, of = f"{call.name}/bus-bandwidth{at}{baseline}", {"unit": "GB/s", "per": "link"}
    return over_time(call.bus_bytes / 1e6, time, id=name, metric="bus-bandwidth", formula=BUS_BANDWIDTH, **of)


def work_of(call: Call) -> dict[str, float]:
    """Return the least work of a call by resource."""
    return {name: amount for name, amount in call.work.amounts.items() if amount > 0} if call.work else {}


def roofline_bound(amounts: Mapping[str, float], peaks: Mapping[str, float]) -> tuple[float, str] | None:
    """Return the least milliseconds of `amounts` and the resource that sets them; None without peak rates."""
    times = [(amounts[name] / peak * 1e3, name) for name, peak in peaks.items() if name in amounts]
    return max(times, key=lambda one: one[0], default=None)


def terms(part: BenchPlan, point: MeasuredPoint[BenchPoint, BenchResult]) -> ComparisonTerms:
    """Return what a case is compared by: what ran, its settings, and what its device can do."""
    calls = point.result.calls
    kernels = {f"{one.name} {one.version}" for call in calls for one in (call.ours, *call.baselines)}
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
        **{f"peak rate {one.resource}": f"{one.rate:.3g}/s" for one in point.result.peak_rates},
    }
    return ComparisonTerms(settings=settings)
