"""What a benchmark measured: its numbers, what it must have to be whole, a table a case, and its figures.

A call's measurements are named after it: `NAME` is our time, `NAME@BASELINE` that of a baseline,
`NAME/METRIC` and `NAME/METRIC@BASELINE` the rest.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from twinrun.foundation.text import GIB, MIB, TERA, number, percent, plural
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.bench import COPY, BenchResult, Call, CallLine, Implementation, largest_error, name_of
from twinrun.protocol.measurements import BUS_BANDWIDTH, Measurement, Numbers, over_time, single
from twinrun.workloads.bench.plan import BenchPlan, BenchPoint, BenchTables, Figure
from twinrun.workloads.settings import Factor, as_fingerprint, flat
from twinrun.workloads.tables_and_charts import (
    ABSENT,
    Cell,
    Chart,
    CurveKind,
    LineChart,
    Mark,
    MarkKind,
    Row,
    RowChart,
    Spot,
    Table,
    curve,
    exact,
    exact_mark,
    measured,
    number_columns,
    sampled,
    text,
    word_columns,
)
from twinrun.workloads.workload import (
    ComparisonTerms,
    Finding,
    MeasuredPoint,
    Overview,
    PictureContext,
    Point,
    Progress,
    RecordView,
    held,
)

CasePoint = MeasuredPoint[BenchPoint, BenchResult]
COLUMNS = ("ours\nms", "baseline\nms", "times\nas fast", "GB/s", "bound ms,\nof bound", "error")
BenchRecord = RecordView[BenchPlan, BenchPoint]
Context = PictureContext[BenchTables]
FACTORS = (
    Factor("kernels", "large", "some", "other code, or another code object"),
    Factor("settings.*", "large", "some", "another shape, or other inputs"),
    Factor("bench.*", "some", "small", "what is timed, and how often"),
    Factor("peak rate *", "some", "none", "clocks, power limits, another memory"),
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
        yield over_time(moved / 1e6, time, id=f"{time.id}/bandwidth", metric="bandwidth", unit="GB/s")
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


def show(record: BenchRecord) -> tuple[Table, ...]:
    """Return a table of each case, a row a call."""
    return tuple(
        Table(
            title=f"{point.id}: medians of {plural(point.devices, 'device')}",
            columns=(*word_columns("call"), *number_columns(*COLUMNS)),
            rows=tuple(_row(point, call.name) for call in point.result.calls),
            notes=_notes(point),
        )
        for point in record.points
    )


def _row(point: CasePoint, name: str) -> tuple[Cell, ...]:
    times = [one for one in point.measurements if one.id.startswith(f"{name}@")]
    speedups = [one for one in point.measurements if one.id.startswith(f"{name}/speedup@")]
    metrics = ("bandwidth", "bus-bandwidth", "roofline-time", "roofline-share", "error")
    moved, bus, bound, of_bound, error = (point.measurement(f"{name}/{one}") for one in metrics)
    rate = bus or moved
    several = "\n".join(f"{number(one.median)} {one.labels['implementation']}" for one in times)
    least = f"{number(bound.median)} {bound.labels['resource']}" if bound else ABSENT
    return (
        text(name),
        measured(point.measurement(name)),
        measured(times[0]) if len(times) == 1 else text(several or ABSENT),
        text(", ".join(f"{one.median:.2f}" for one in speedups) or ABSENT),
        text(number(rate.median) if rate else ABSENT),
        text(least, percent(of_bound.median) if of_bound else ""),
        text(f"{error.median:.1g}" if error else ABSENT),
    )


def _notes(point: CasePoint) -> tuple[str, ...]:
    calls = point.result.calls
    versions = {f"{one.name} {one.version}": None for call in calls for one in (call.ours, *call.baselines)}
    absent = dict.fromkeys(f"no baseline: {why}" for call in calls for why in call.absent.values())
    peaks = (
        f"{one.resource}: {number(one.rate / TERA)} T{'B' if one.resource == COPY else ''}/s, {one.how}"
        for one in point.result.peak_rates
    )
    return (", ".join(versions), *absent, *peaks)


class Drawn(NamedTuple):
    """A measurement that a figure draws, and where it is from."""

    record: BenchRecord
    point: CasePoint
    call: Call
    one: Measurement
    ours: bool
    """Whether it is of our call, and not of a baseline."""


def overview(records: Sequence[BenchRecord], drawn: Context) -> Overview:
    """Return the figures that the recipe declares, of all `records`."""
    charts: list[Chart] = []
    for place, figure in enumerate(drawn.recipe.tables.figure):
        # One picture for each combination of values of the labels that it is made for.
        groups: dict[tuple[str, ...], list[Drawn]] = {}
        for item in _drawn(figure, records):
            groups.setdefault(tuple(item.call.labels.get(name, "") for name in figure.each), []).append(item)
        draw = _lines if figure.over else _case_rows
        for group, items in groups.items():
            charts += draw(figure, items, drawn, ["figure", str(place), *group])
    return Overview(charts=tuple(charts))


def _drawn(figure: Figure, records: Sequence[BenchRecord]) -> Iterator[Drawn]:
    """Yield the measurements of a figure's metric at its cases, of calls with its labels."""
    points = ((record, point) for record in records for point in record.points)
    for record, point in points:
        calls = {one.name: one for one in point.result.calls}
        found = [one for one in point.measurements if one.metric == figure.metric and "call" in one.labels]
        for one in found if point.id in (figure.cases or (point.id,)) else ():
            call = calls[one.labels["call"]]
            if all(call.labels.get(name, few[0]) in few for name, few in figure.where.items()):
                yield Drawn(record, point, call, one, ours="@" not in one.id)


def _claims(figure: Figure, items: Sequence[Drawn], drawn: Context) -> Iterator[tuple[str, float, str, str]]:
    """Yield the case, the value, the device and the software of each claim about the calls of a picture."""
    calls = {item.call.name for item in items}
    for claim in drawn.recipe.published.claim:
        about = claim.metric == figure.metric and claim.measurement in calls
        if claim.hardware and claim.point and about and claim.point in (figure.cases or (claim.point,)):
            gpu = drawn.gpus[claim.hardware.gpu]
            die = " die" if claim.hardware.devices and gpu.devices_per_card > 1 else ""
            device = f"{gpu.name.split(' ', 1)[-1]}{die}"
            yield claim.point, claim.value, device, claim.hardware.software


def _case_rows(
    figure: Figure, items: Sequence[Drawn], drawn: Context, name: Sequence[str]
) -> Iterator[RowChart]:
    """Yield for each case what was published of it, ours and baselines, and the bound."""
    claims = list(_claims(figure, items, drawn))
    better = "Lower" if figure.metric == "time" else "Higher"
    for case in figure.cases or dict.fromkeys(case for case, *_ in claims):
        here = [item for item in items if item.point.id == case]
        several, title = len({item.record.run for item in here}) > 1, here[0].call.title if here else case
        rows = [
            Row(
                label=f"published, {device}", marks=(exact_mark("published", value, f"{device}: {software}"),)
            )
            for at, value, device, software in claims
            if at == case
        ]
        yield RowChart(
            name="-".join([*name, *re.findall(r"[^\W_]+", case)]),
            title=f"{figure.title or title[:1].upper() + title[1:]}, {case}",
            x_label="milliseconds" if figure.metric == "time" else items[0].one.unit,
            rows=(*rows, *(row for item in here for row in _rows(figure, item, several=several))),
            notes=(f"{better} is better.", "The axis is linear from zero."),
        )


def _rows(figure: Figure, item: Drawn, *, several: bool) -> Iterator[Row]:
    """Yield the row of a measurement and, of our time, that of its bound."""
    record, point, call, one, ours = item
    who, gpu = one.labels["implementation"], record.gpu.name if record.gpu else "here"
    where = f"{gpu}, " if several else ""
    what = ", ".join(filter(None, (call.labels.get(name, "") for name in figure.series)))
    version = next((by.version for by in (call.ours, *call.baselines) if by.name == who), "")
    detail = f"{who} {version}, {record.label}; median, lowest to highest of {one.count}"
    kind: MarkKind = "measured" if ours else "baseline"
    mark = Mark(kind=kind, value=one.median, low=one.low, high=one.high, detail=detail)
    yield Row(label=f"{where}{'ours' if ours else who} {what}", marks=(mark,))
    if ours and figure.metric == "time" and (bound := point.measurement(f"{one.id}/roofline-time")):
        detail = f"{call.work.formula if call.work else ''}, set by {bound.labels['resource']}"
        yield Row(label=f"{where}bound {what}", marks=(exact_mark("bound", bound.median, detail),))


def _lines(
    figure: Figure, items: Sequence[Drawn], drawn: Context, name: Sequence[str]
) -> Iterator[LineChart]:
    """Yield a chart over a setting of the cases: a curve for each GPU and software, run and series."""
    tables, over = drawn.recipe.tables, str(figure.over)
    silent = {one.name: one.default for one in tables.label}
    shared = Counter({item.record.run: item.record.label for item in items}.values())
    series: dict[tuple[CurveKind, str], dict[float, Spot]] = {}
    for case, value, device, software in _claims(figure, items, drawn):
        if isinstance(x := tables.cases[case].get(over), int):
            said = f"published: {device}, {software}"
            series.setdefault(("published", said), {}).setdefault(x, exact(x, value))
    for record, point, call, one, ours in sorted(items, key=lambda item: not item.ours):
        # A baseline is timed beside each of our calls, and drawn once: labels of a series are ours.
        labels = [label for key in figure.series if (label := call.labels.get(key)) != silent[key]]
        # Records that share a label are told apart by their times.
        run = f"run {record.run[:15]}" if shared[record.label] > 1 else ""
        devices = f"{point.devices} devices" if point.devices > 1 else ""
        parts = (record.label, run, *(labels if ours else ()), one.labels["implementation"], devices)
        if isinstance(x := point.part.settings.get(over), int):
            series.setdefault(("measured", ", ".join(filter(None, parts))), {}).setdefault(x, sampled(x, one))
    kinds = [kind for kind, _ in series]
    curves = (
        curve(label, kind, place - kinds.index(kind), spots.values())
        for place, ((kind, label), spots) in enumerate(series.items())
    )
    yield LineChart(
        name="-".join(name),
        title=", ".join([figure.title or figure.metric.replace("-", " "), *name[2:]]),
        x_label=over,
        x_scale="log2",
        y_label=f"{items[0].one.unit} per {items[0].one.per}",
        y_scale="count",
        curves=tuple(curves),
    )
