"""What a benchmark's record shows: a table a case, and the figures that its recipe declares."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from twinrun.foundation.text import TERA, number, percent, plural
from twinrun.protocol.bench import COPY, Call
from twinrun.protocol.measurements import Measurement
from twinrun.workloads.bench.numbers import CasePoint
from twinrun.workloads.bench.plan import BenchPlan, BenchPoint, BenchTables, Figure
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
from twinrun.workloads.workload import Overview, PictureContext, RecordView

COLUMNS = ("ours\nms", "baseline\nms", "times\nas fast", "GB/s,\nof a copy", "bound ms,\nof bound", "error")
BenchRecord = RecordView[BenchPlan, BenchPoint]
Context = PictureContext[BenchTables]


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
    call: Call
    one: Measurement

    @property
    def is_ours(self) -> bool:
        """Whether it is of our call, and not of a baseline."""
        return "@" not in self.one.id


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
                yield Drawn(record, point, call, one)


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
    record, point, call, one = item
    who, gpu = one.labels["implementation"], record.gpu.name if record.gpu else "here"
    where, ours = f"{gpu}, " if several else "", item.is_ours
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
    for item in sorted(items, key=lambda one: not one.is_ours):
        record, point, call, one = item
        # A baseline is timed beside each of our calls, and drawn once: labels of a series are ours.
        labels = [label for key in figure.series if (label := call.labels.get(key)) != silent[key]]
        # Records that share a label are told apart by their times.
        run = f"run {record.run[:15]}" if shared[record.label] > 1 else ""
        devices = f"{point.devices} devices" if point.devices > 1 else ""
        own = labels if item.is_ours else []
        parts = filter(None, (record.label, run, *own, one.labels["implementation"], devices))
        if isinstance(x := point.part.settings.get(over), int):
            series.setdefault(("measured", ", ".join(parts)), {}).setdefault(x, sampled(x, one))
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
