"""What a benchmark's record shows: a table a case, and the figures that its recipe declares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from twinrun.foundation.text import TERA, number, percent, plural
from twinrun.manifests.claims import Claim
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.bench import COPY, BenchResult, Call
from twinrun.protocol.measurements import Measurement
from twinrun.workloads.bench.manifest import BenchPlan, BenchPoint, BenchTables, Figure
from twinrun.workloads.bench.numbers import bus_bandwidth
from twinrun.workloads.tables_and_charts import (
    ABSENT,
    Bar,
    BarChart,
    Cell,
    Chart,
    Curve,
    LineChart,
    Spot,
    Table,
    curve,
    exact,
    measured,
    number_columns,
    sampled,
    text,
    word_columns,
)
from twinrun.workloads.workload import MeasuredPoint, Overview, PictureContext, RecordView

COLUMNS = ("ours\nms", "baseline\nms", "times\nas fast", "GB/s,\nof a copy", "bound ms,\nof bound", "error")
BenchRecord = RecordView[BenchPlan, BenchPoint]
CasePoint = MeasuredPoint[BenchPoint, BenchResult]


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
    times = [one for one in point.measurements if one.metric == "time" and one.id.startswith(f"{name}@")]
    speedups = [one for one in point.measurements if one.id.startswith(f"{name}/speedup@")]
    metrics = ("bandwidth", "bandwidth-share", "bus-bandwidth", "roofline-time", "roofline-share", "error")
    moved, of_copy, bus, bound, of_bound, error = (point.measurement(f"{name}/{one}") for one in metrics)
    rate = bus or moved
    several = "\n".join(f"{number(one.median)} {one.labels['implementation']}" for one in times)
    least = f"{number(bound.median)} {bound.labels['resource']}" if bound else ABSENT
    return (
        text(name),
        measured(point.measurement(name)),
        measured(times[0]) if len(times) == 1 else text(several or ABSENT),
        text(", ".join(f"{one.median:.2f}" for one in speedups) or ABSENT),
        text(number(rate.median) if rate else ABSENT, percent(of_copy.median) if of_copy else ""),
        text(least, percent(of_bound.median) if of_bound else ""),
        text(f"{error.median:.1g}" if error else ABSENT),
    )


def _notes(point: CasePoint) -> tuple[str, ...]:
    calls = point.result.calls
    made = [one for call in calls for one in (call.ours, *call.baselines)]
    versions = dict.fromkeys(f"{one.name} {one.version}" for one in made)
    absent = dict.fromkeys(f"no baseline: {why}" for call in calls for why in call.absent.values())
    peaks = [
        f"{one.resource}: {number(one.rate / TERA)} T{'B' if one.resource == COPY else ''}/s, {one.how}"
        for one in point.result.peak_rates
    ]
    return (", ".join(versions), *absent, *peaks)


class Drawn(NamedTuple):
    """A measurement that a figure draws, and where it is from."""

    record: BenchRecord
    point: CasePoint
    one: Measurement

    @property
    def call(self) -> Call | None:
        """The call that was measured."""
        name = self.one.labels.get("call")
        return next((call for call in self.point.result.calls if call.name == name), None)


def overview(records: Sequence[BenchRecord], drawn: PictureContext[BenchTables]) -> Overview:
    """Return the figures that the recipe declares, of all `records`."""
    charts: list[Chart] = []
    for place, figure in enumerate(drawn.recipe.tables.figure):
        found = [
            Drawn(record, point, one)
            for record in records
            for point in record.points
            for one in point.measurements
            if one.metric == figure.metric
            and all(one.labels.get(name, values[0]) in values for name, values in figure.where.items())
        ]
        bars = figure.kind == "bars"
        charts += _bars(figure, found, drawn) if bars else _lines(figure, found, drawn, f"lines-{place}")
    return Overview(charts=tuple(charts))


def _groups(figure: Figure, found: Sequence[Drawn]) -> dict[tuple[str, ...], list[Drawn]]:
    """Return what goes into each picture, by the values of the labels that it is made for."""
    groups: dict[tuple[str, ...], list[Drawn]] = {}
    for item in found:
        groups.setdefault(tuple(item.one.labels.get(name, "") for name in figure.each), []).append(item)
    return groups


def _part_of(claim: Claim, gpus: Mapping[str, Gpu], *, short: bool) -> str:
    """Return the GPU that a claim is about, or the die of it."""
    assert claim.hardware is not None
    gpu = gpus[claim.hardware.gpu]
    name = gpu.name.rpartition(" ")[2] if short else gpu.name
    return f"{name} die" if claim.hardware.devices and gpu.devices_per_card > 1 else name


def _bars(figure: Figure, found: Sequence[Drawn], drawn: PictureContext[BenchTables]) -> Iterator[BarChart]:
    claims = [one for one in drawn.recipe.published.claim if one.metric == figure.metric and one.point]
    time = figure.metric == "time"
    for case in figure.cases or dict.fromkeys(one.point for one in claims if one.point):
        here = [item for item in found if item.point.id == case]
        several = len({item.record.run for item in here}) > 1
        for group, items in _groups(figure, here).items():
            names = {item.one.labels["call"] for item in items}
            bars = [
                _published_bar(one, drawn.gpus)
                for one in claims
                if one.point == case and one.measurement in names
            ]
            bars += [bar for item in items for bar in _measured_bars(figure, item, several=several)]
            title = next((item.call.title for item in items if item.call), case)
            marks = "".join(letter if letter.isalnum() else "-" for letter in case)
            yield BarChart(
                name="-".join(["bars", *group, marks]),
                title=f"{title[:1].upper()}{title[1:]}, {case}",
                unit="milliseconds" if time else items[0].one.unit,
                better="lower" if time else "higher",
                bars=tuple(bars),
                notes=("The axis is linear from zero.",),
            )


def _published_bar(claim: Claim, gpus: Mapping[str, Gpu]) -> Bar:
    assert claim.hardware is not None
    part, value = _part_of(claim, gpus, short=True), claim.value
    ends = {"value": value, "low": value, "high": value}
    detail = f"{part}: {claim.hardware.software}"
    return Bar(label=f"published, {part}", kind="published", detail=detail, **ends)


def _measured_bars(figure: Figure, item: Drawn, *, several: bool) -> Iterator[Bar]:
    record, point, one = item
    call, who = item.call, one.labels["implementation"]
    where = f"{record.gpu.name.split()[1] if record.gpu else 'here'} " if several else ""
    ours = one.id == one.labels["call"]
    what = ", ".join(filter(None, (one.labels.get(name, "") for name in figure.series)))
    made = (call.ours, *call.baselines) if call else ()
    version = next((by.version for by in made if by.name == who), "")
    yield Bar(
        label=f"{where}{'ours' if ours else who} {what}",
        kind="measured" if ours else "baseline",
        value=one.median,
        low=one.low,
        high=one.high,
        detail=f"{who} {version}, {record.label}; median, lowest to highest of {one.count}",
    )
    if ours and figure.metric == "time" and (bound := point.measurement(f"{one.id}/roofline-time")):
        ends = {"value": bound.median, "low": bound.median, "high": bound.median}
        formula = call.work.formula if call and call.work else ""
        detail = f"{formula}, set by {bound.labels['resource']}"
        yield Bar(label=f"{where}bound {what}", kind="bound", detail=detail, **ends)


def _lines(
    figure: Figure, found: Sequence[Drawn], drawn: PictureContext[BenchTables], name: str
) -> Iterator[LineChart]:
    found = [item for item in found if not figure.cases or item.point.id in figure.cases]
    silent = {one.name: one.default for one in drawn.recipe.tables.label}
    runs = {item.record.run: item.record.label for item in found}
    shared = Counter(runs.values())
    points = list(dict.fromkeys((item.record.run, item.point.id) for item in found))
    every = sorted(
        (*found, *_baselines(figure, found)),
        key=lambda item: points.index((item.record.run, item.point.id)),
    )
    for group, items in _groups(figure, every).items():
        series: dict[str, list[Spot]] = {}
        for record, point, one in items:
            values = [one.labels.get(key, "") for key in figure.series if one.labels.get(key) != silent[key]]
            devices = f"{point.devices} devices" if point.devices > 1 else ""
            # Records that share a label are told apart by their times.
            run = f"run {record.run[:15]}" if shared[record.label] > 1 else ""
            parts = filter(None, (record.label, run, *values, one.labels["implementation"], devices))
            value = point.part.settings.get(str(figure.over))
            x = float(value) if isinstance(value, int) else 0.0
            series.setdefault(", ".join(parts), []).append(sampled(x, one))
        names, unit = {item.one.labels.get("call", "") for item in items}, items[0].one
        curves = [
            curve(label, "measured", place, spots) for place, (label, spots) in enumerate(series.items())
        ]
        yield LineChart(
            name="-".join([name, figure.metric, *group]),
            title=", ".join([figure.metric.replace("-", " "), *group, *_in_common(figure, drawn)]),
            x_label=str(figure.over),
            x_scale="log2",
            y_label=f"{unit.unit} per {unit.per}",
            y_scale="count",
            curves=(*_published_lines(figure, names, drawn), *curves),
        )


def _published_lines(figure: Figure, calls: set[str], drawn: PictureContext[BenchTables]) -> Iterator[Curve]:
    """Yield what claims say of a figure's cases: a curve for each GPU and software."""
    found: dict[tuple[str, str], list[Spot]] = {}
    for claim in drawn.recipe.published.claim:
        x = drawn.recipe.tables.cases.get(claim.point or "", {}).get(str(figure.over))
        about = claim.metric == figure.metric and claim.measurement in calls
        if (
            claim.hardware
            and about
            and isinstance(x, int)
            and claim.point in (figure.cases or (claim.point,))
        ):
            name = _part_of(claim, drawn.gpus, short=False)
            found.setdefault((name, claim.hardware.software), []).append(exact(float(x), claim.value))
    for place, ((name, detail), spots) in enumerate(found.items()):
        yield curve(f"published: {name}", "published", place, spots, detail)


def _in_common(figure: Figure, drawn: PictureContext[BenchTables]) -> Iterator[str]:
    """Yield the counts that the cases of a figure share, where it names its cases."""
    for name in ("batch", "heads"):
        values = {drawn.recipe.tables.cases[case].get(name) for case in figure.cases}
        if len(values) == 1 and None not in values:
            yield f"{name} {values.pop()}"


def _baselines(figure: Figure, found: Sequence[Drawn]) -> list[Drawn]:
    """Return the bus bandwidth of each baseline once a point, though it is timed beside each of our calls."""
    kept: dict[tuple[str, ...], Drawn] = {}
    for item in found if figure.metric == "bus-bandwidth" else ():
        for time in item.point.measurements:
            if time.metric == "time" and time.id.startswith(f"{item.one.labels['call']}@") and item.call:
                # Without the labels of a series, which tell calls of ours apart.
                labels = {name: time.labels.get(name, "") for name in (*figure.each, "implementation")}
                bandwidth = bus_bandwidth(item.call, time)
                assert bandwidth is not None
                key = (item.record.run, item.point.id, *labels.values())
                one = bandwidth.model_copy(update={"labels": labels})
                kept.setdefault(key, item._replace(one=one))
    return list(kept.values())
