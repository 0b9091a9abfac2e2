"""What a benchmark's record shows: a table a case, and the figures that its recipe declares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from twinrun.foundation.text import TERA, number, percent
from twinrun.manifests.claims import Claim
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.bench import COPY, BenchResult, Call
from twinrun.protocol.measurements import Measurement
from twinrun.workloads.bench.manifest import BenchPlan, BenchPoint, BenchTables, Figure
from twinrun.workloads.bench.numbers import bus_bandwidth
from twinrun.workloads.tables_and_charts import (
    Bar,
    BarChart,
    Cell,
    Chart,
    Column,
    Curve,
    LineChart,
    Spot,
    Table,
    measured,
    text,
)
from twinrun.workloads.workload import MeasuredPoint, Overview, PictureContext, RecordView

COLUMNS = ("ours\nms", "baseline\nms", "times\nas fast", "GB/s,\nof a copy", "bound ms,\nof bound", "error")


def calls_of(point: MeasuredPoint) -> list[str]:
    """Return the names of the calls of a point, in their order."""
    return [one.name for one in point.result.calls]


def show(record: RecordView[BenchPlan, BenchPoint]) -> tuple[Table, ...]:
    """Return a table of each case."""
    return tuple(_point_table(point) for point in record.points)


def overview(records: Sequence[RecordView], drawn: PictureContext[BenchTables]) -> Overview:
    """Return the figures that the recipe declares, of all `records`."""
    found: list[Chart] = []
    for number_, figure in enumerate(drawn.recipe.tables.figure):
        if figure.kind == "bars":
            found += _bars(figure, records, drawn)
        else:
            found += _lines(figure, records, drawn, f"lines-{number_}")
    return Overview(charts=tuple(found))


def _point_table(point: MeasuredPoint) -> Table:
    """Return a row for each call of a case."""
    return Table(
        title=f"{point.id}: medians of {point.devices} device{'' if point.devices == 1 else 's'}",
        columns=(Column(title="call", numeric=False), *(Column(title=title) for title in COLUMNS)),
        rows=tuple(_row(point, name) for name in calls_of(point)),
        notes=_notes(point),
    )


def _row(point: MeasuredPoint, name: str) -> tuple[Cell, ...]:
    baselines = [one for one in point.measurements if one.metric == "time" and one.id.startswith(f"{name}@")]
    speedups = [one for one in point.measurements if one.id.startswith(f"{name}/speedup@")]
    bandwidth, bound = point.measurement(f"{name}/bandwidth"), point.measurement(f"{name}/roofline-time")
    rate = point.measurement(f"{name}/bus-bandwidth") or bandwidth
    error = point.measurement(f"{name}/error")
    return (
        text(name),
        measured(point.measurement(name)),
        _several(baselines),
        text(", ".join(f"{one.median:.2f}" for one in speedups) or "-"),
        text(number(rate.median) if rate else "-", _share(point.measurement(f"{name}/bandwidth-share"))),
        text(
            f"{number(bound.median)} {bound.labels['resource']}" if bound else "-",
            _share(point.measurement(f"{name}/roofline-share")),
        ),
        text(f"{error.median:.1g}" if error else "-"),
    )


def _several(found: list[Measurement]) -> Cell:
    if len(found) == 1:
        return measured(found[0])
    return text("\n".join(f"{number(one.median)} {one.labels['implementation']}" for one in found) or "-")


def _share(found: Measurement | None) -> str:
    return percent(found.median) if found else ""


def _notes(point: MeasuredPoint[BenchPoint, BenchResult]) -> tuple[str, ...]:
    calls = point.result.calls
    versions = dict.fromkeys(
        f"{one.name} {one.version}" for call in calls for one in (call.ours, *call.baselines)
    )
    absent = dict.fromkeys(f"no baseline: {why}" for call in calls for why in call.absent.values())
    peaks = [
        f"{one.resource}: {number(one.rate / TERA)} T{'B' if one.resource == COPY else ''}/s, {one.how}"
        for one in point.result.peak_rates
    ]
    return (", ".join(versions), *absent, *peaks)


def _call(point: MeasuredPoint[BenchPoint, BenchResult], name: str) -> Call | None:
    return next((one for one in point.result.calls if one.name == name), None)


def _chosen(point: MeasuredPoint, figure: Figure) -> list[Measurement]:
    """Return the measurements of a point that a figure draws."""
    return [
        one
        for one in point.measurements
        if one.metric == figure.metric
        and all(one.labels.get(name, values[0]) in values for name, values in figure.where.items())
    ]


def _groups(figure: Figure, found: Sequence[Measurement]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(tuple(one.labels.get(name, "") for name in figure.each) for one in found))


def _bars(
    figure: Figure, records: Sequence[RecordView], drawn: PictureContext[BenchTables]
) -> Iterator[BarChart]:
    claims = [one for one in drawn.recipe.published.claim if one.metric == figure.metric and one.point]
    cases = figure.cases or tuple(dict.fromkeys(one.point for one in claims if one.point))
    for case in cases:
        points = [(record, point) for record in records for point in record.points if point.id == case]
        every = [one for _, point in points for one in _chosen(point, figure)]
        for group in _groups(figure, every):
            names = {one.labels["call"] for one in every if _in(one, figure, group)}
            bars = [
                _published_bar(one, drawn.gpus)
                for one in claims
                if (one.point, one.measurement in names) == (case, True)
            ]
            for record, point in points:
                bars += _measured_bars(figure, group, record, point, several=len(points) > 1)
            calls = (_call(point, name) for _, point in points for name in names)
            title = next((call.title for call in calls if call), case)
            yield BarChart(
                name="-".join(
                    ["bars", *group, "".join(letter if letter.isalnum() else "-" for letter in case)]
                ),
                title=f"{title[:1].upper()}{title[1:]}, {case}",
                unit="milliseconds" if figure.metric == "time" else every[0].unit,
                better="lower" if figure.metric == "time" else "higher",
                bars=tuple(bars),
                notes=("The axis is linear from zero.",),
            )


def _in(one: Measurement, figure: Figure, group: tuple[str, ...]) -> bool:
    return tuple(one.labels.get(name, "") for name in figure.each) == group


def _published_bar(claim: Claim, gpus: dict[str, Gpu]) -> Bar:
    assert claim.hardware is not None
    gpu = gpus[claim.hardware.gpu]
    short = gpu.name.rpartition(" ")[2]
    part = f"{short} die" if claim.hardware.devices and gpu.devices_per_card > 1 else short
    value = claim.value
    detail = f"{part}: {claim.hardware.software}"
    return Bar(
        label=f"published, {part}", kind="published", value=value, low=value, high=value, detail=detail
    )


def _measured_bars(
    figure: Figure, group: tuple[str, ...], record: RecordView, point: MeasuredPoint, *, several: bool
) -> Iterator[Bar]:
    where = f"{record.gpu.name.split()[1] if record.gpu else 'here'} " if several else ""
    for one in _chosen(point, figure):
        if not _in(one, figure, group):
            continue
        ours = one.id == one.labels["call"]
        what = ", ".join(filter(None, (one.labels.get(name, "") for name in figure.series)))
        who = "ours" if ours else one.labels["implementation"]
        call = _call(point, one.labels["call"])
        made = (call.ours, *call.baselines) if call else ()
        version = next((by.version for by in made if by.name == one.labels["implementation"]), "")
        yield Bar(
            label=f"{where}{who} {what}",
            kind="measured" if ours else "baseline",
            value=one.median,
            low=one.low,
            high=one.high,
            detail=f"{one.labels['implementation']} {version}, {record.label};"
            f" median, lowest to highest of {one.count}",
        )
        if ours and figure.metric == "time" and (bound := point.measurement(f"{one.id}/roofline-time")):
            value = bound.median
            formula = call.work.formula if call and call.work else ""
            detail = f"{formula}, set by {bound.labels['resource']}"
            yield Bar(
                label=f"{where}bound {what}", kind="bound", value=value, low=value, high=value, detail=detail
            )


def _lines(
    figure: Figure, records: Sequence[RecordView], drawn: PictureContext[BenchTables], name: str
) -> Iterator[LineChart]:
    silent = {one.name: one.default for one in drawn.recipe.tables.label}
    names_of = _told_apart(records)
    found = [
        (record, point, one)
        for record in records
        for point in record.points
        if not figure.cases or point.id in figure.cases
        for one in (*_chosen(point, figure), *_baselines(point, figure))
    ]
    for group in _groups(figure, [one for _, _, one in found]):
        chosen = [item for item in found if _in(item[2], figure, group)]
        series: dict[str, list[Spot]] = {}
        for record, point, one in chosen:
            label = f"{names_of[record.run]}{_series_label(figure, point, one, silent)}"
            series.setdefault(label, []).append(_over(figure, point, one))
        curves = [
            Curve(
                label=label, kind="measured", place=place, spots=tuple(sorted(spots, key=lambda spot: spot.x))
            )
            for place, (label, spots) in enumerate(series.items())
        ]
        published = _published_lines(figure, {one.labels.get("call", "") for _, _, one in chosen}, drawn)
        unit = chosen[0][2].unit
        yield LineChart(
            name="-".join([name, figure.metric, *group]),
            title=", ".join([figure.metric.replace("-", " "), *group, *_in_common(figure, drawn)]),
            x_label=str(figure.over),
            x_scale="log2",
            y_label=f"{unit} per {chosen[0][2].per}",
            y_scale="count",
            curves=(*published, *curves),
        )


def _published_lines(figure: Figure, calls: set[str], drawn: PictureContext[BenchTables]) -> Iterator[Curve]:
    """Yield what claims say of a figure's cases: a curve for each GPU and software."""
    found: dict[tuple[str, str], list[Spot]] = {}
    for claim in drawn.recipe.published.claim:
        settings = drawn.recipe.tables.cases.get(claim.point or "", {})
        if (
            claim.hardware
            and (claim.metric, claim.measurement in calls) == (figure.metric, True)
            and (claim.point in figure.cases or not figure.cases)
            and isinstance(x := settings.get(str(figure.over)), int)
        ):
            die = (
                " die"
                if claim.hardware.devices and drawn.gpus[claim.hardware.gpu].devices_per_card > 1
                else ""
            )
            name = f"{drawn.gpus[claim.hardware.gpu].name}{die}"
            spot = Spot(x=float(x), value=claim.value, low=claim.value, high=claim.value)
            found.setdefault((name, claim.hardware.software), []).append(spot)
    for place, ((name, detail), spots) in enumerate(found.items()):
        ordered = tuple(sorted(spots, key=lambda spot: spot.x))
        yield Curve(label=f"published: {name}", kind="published", place=place, spots=ordered, detail=detail)


def _in_common(figure: Figure, drawn: PictureContext[BenchTables]) -> Iterator[str]:
    """Yield the counts that the cases of a figure share, where it names its cases."""
    settings = [drawn.recipe.tables.cases[case] for case in figure.cases]
    for name in ("batch", "heads"):
        values = {one.get(name) for one in settings}
        if len(values) == 1 and None not in values:
            yield f"{name} {values.pop()}"


def _baselines(point: MeasuredPoint, figure: Figure) -> list[Measurement]:
    """Return the bus bandwidth of each baseline once, though it was timed beside every call of ours."""
    found: dict[tuple[str, ...], Measurement] = {}
    for ours in _chosen(point, figure) if figure.metric == "bus-bandwidth" else ():
        for time in point.measurements:
            if time.metric == "time" and time.id.startswith(f"{ours.labels['call']}@"):
                # Without the labels of a series, which tell calls of ours apart.
                labels = {name: time.labels.get(name, "") for name in (*figure.each, "implementation")}
                call = _call(point, ours.labels["call"])
                bandwidth = bus_bandwidth(call, time) if call else None
                assert bandwidth is not None
                found.setdefault(tuple(labels.values()), bandwidth.model_copy(update={"labels": labels}))
    return list(found.values())


def _told_apart(records: Sequence[RecordView]) -> dict[str, str]:
    """Return a label for each run; with its time where records share their own."""
    shared = Counter(record.label for record in records)
    return {
        record.run: record.label + (f", run {record.run[:15]}" if shared[record.label] > 1 else "")
        for record in records
    }


def _series_label(
    figure: Figure, point: MeasuredPoint, one: Measurement, silent: Mapping[str, str | None]
) -> str:
    """Return what follows the record's label, without values that names of calls leave out too."""
    values = [one.labels.get(name, "") for name in figure.series if one.labels.get(name) != silent[name]]
    devices = f"{point.devices} devices" if point.devices > 1 else ""
    return "".join(f", {part}" for part in (*values, one.labels["implementation"], devices) if part)


def _over(figure: Figure, point: MeasuredPoint[BenchPoint], one: Measurement) -> Spot:
    value = point.part.settings.get(str(figure.over))
    x = float(value) if isinstance(value, int) else 0.0
    return Spot(x=x, value=one.median, low=one.low, high=one.high)
