"""What a training record shows: a table of its points and layouts, scaling curves, loss curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from twinrun.foundation.text import GIB, number
from twinrun.manifests.published import PublishedClaims
from twinrun.workloads.curve_charts import distance_in_words, parity_charts, series_chart
from twinrun.workloads.curve_distance import largest_difference, parity, values_of
from twinrun.workloads.tables_and_charts import (
    ABSENT,
    Cell,
    Chart,
    Curve,
    LineChart,
    Spot,
    Table,
    curve,
    measured,
    number_columns,
    sampled,
    text,
    word_columns,
)
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint, TrainingTables
from twinrun.workloads.training.numbers import VALIDATION
from twinrun.workloads.training.rates import published_curves, rates
from twinrun.workloads.training.terms import loss_of
from twinrun.workloads.workload import MeasuredPoint, Overview, PictureContext, RecordView, whole

TrainingRecord = RecordView[TrainingPlan, TrainingPoint]
LOSS = "loss, nats/token"
# Columns of the points: heading and measurement.
POINTS = {
    "tokens/s\nper device": "tokens-per-second",
    "model TFLOP/s\nper device": "model-flops",
    "MFU": "model-flops-share",
    "s/step": "step-time",
    "GiB per\ndevice": "peak-memory",
    "last loss\nnats/token": "loss",
    "W per\ndevice": "power",
    "tokens/s\nper watt": "tokens-per-second-per-watt",
}
PREDICTED = ("s/step\npredicted", "s/step\nmeasured", "error", "GiB\npredicted", "GiB\nmeasured", "error ")


def show(record: TrainingRecord) -> tuple[Table, ...]:
    """Return a table of the points, of what was predicted of them, and of what layouts do."""
    reports = {metric: metric for metric in record.part.training.reports}
    columns = {
        head: name
        for head, name in (POINTS | reports).items()
        if any(point.measurement(name) for point in record.points)
    }
    points = Table(
        title="Points: median of the timed steps, and how far the farthest is from it",
        columns=(*word_columns("point"), *number_columns("micro-\nbatch", *columns)),
        rows=tuple(
            (
                text(point.id, point.result.parallelism),
                text(str(point.result.microbatch)),
                *(measured(point.measurement(name), share=head == "MFU") for head, name in columns.items()),
            )
            for point in record.points
        ),
        notes=tuple(_notes(record)),
    )
    return (points, *_predicted(record), *_layouts(record.points))


def _notes(record: TrainingRecord) -> Iterator[str]:
    (formula, least), *others = record.part.shape.flops_by_formula().items()
    yield f"model FLOP/s: {formula}"
    yield from (f"by {name}: {more / least:.3f} times as many" for name, more in others)
    for point in record.points:
        for one in (one for one in point.measurements if one.metric == VALIDATION):
            yield f"{one.id} of {point.id}: {one.median:.4f} nats/token"
    powered = {point.result.power.sensor for point in record.points if point.measurement("power")}
    yield from sorted(f"W: {sensor}" for sensor in powered if sensor)
    if record.gpu and any(point.measurement("model-flops-share") for point in record.points):
        peak = number(record.gpu.peak_bf16_tflops / record.gpu.devices_per_card)
        yield f"MFU: over {peak} TFLOP/s dense bf16 per device ({record.gpu.source})"
    else:
        yield "MFU: no dense peak is known for this device in this precision"


def _predicted(record: TrainingRecord) -> Iterator[Table]:
    """Yield the predictions of a record's plan beside what was measured; none where it has none."""
    rows, known = [], record.predicted.values()
    for point in record.points:
        if one := record.predicted.get(point.id):
            ends = one.covers if one.seconds is not None else None
            seconds = (
                text(number(one.seconds or 0), " to ".join(map(number, ends))) if ends else text("cannot say")
            )
            cells = [(seconds, one.seconds, "step-time", ends)]
            needs = one.memory_bytes / GIB
            cells += [(text(number(needs)), needs, "peak-memory", None)]
            rows.append(
                (text(point.id), *(part for cell in cells for part in _beside_measured(point, *cell)))
            )
    if rows:
        unknown = dict.fromkeys(f"Cannot say: {one.unknown}." for one in known if one.unknown)
        versions = sorted({f"{one.software} in version {one.calibration}" for one in known})
        held = "its interval holds the measured time nine times of ten."
        yield Table(
            title="Predicted before the run, beside what was measured",
            columns=(*word_columns("point"), *number_columns(*PREDICTED)),
            rows=tuple(rows),
            notes=(*unknown, f"Calibration: {', '.join(versions)}; {held}"),
        )


def _beside_measured(
    point: MeasuredPoint, shown: Cell, predicted: float | None, name: str, ends: tuple[float, float] | None
) -> tuple[Cell, Cell, Cell]:
    """Return what was predicted, what was measured, and the error with whether the interval holds it."""
    found = point.measurement(name)
    if found is None or not found.median or predicted is None:
        return shown, text(number(found.median) if found else ABSENT), text(ABSENT)
    inside = "" if not ends else "inside" if ends[0] <= found.median <= ends[1] else "outside"
    return shown, text(number(found.median)), text(f"{predicted / found.median - 1:+.1%}", inside)


def _layouts(points: Sequence[MeasuredPoint[TrainingPoint]]) -> Iterator[Table]:
    """Yield the layouts beside plain data parallelism of the same model; nothing of a sweep over sizes."""
    if not any(point.part.layout for point in points):
        return
    plains = [point for point in reversed(points) if (at := point.part.layout) and at.plain]
    plain = {point.part.shape: point for point in plains}
    heads = ("ranks", "tokens/s over\nbaseline's", "loss: largest\ndifference")
    yield Table(
        title="Layouts beside PyTorch's own data parallelism of the same model",
        columns=(*word_columns("layout"), *number_columns(*heads)),
        rows=tuple(
            (
                text(point.id, point.result.parallelism),
                text(str(point.devices)),
                *map(text, _beside(point, plain.get(point.part.shape))),
            )
            for point in points
        ),
        notes=(
            "tokens/s are per device, so a ratio compares layouts of the same or another number of ranks.",
        ),
    )


def _beside(point: MeasuredPoint, plain: MeasuredPoint | None) -> tuple[str, str]:
    """Return the speed of a layout over its baseline's, and how far their losses are apart."""
    over, under = (one and one.measurement("tokens-per-second") for one in (point, plain))
    if not over or not under or plain is None or plain is point:
        return ABSENT, ABSENT
    apart, _ = largest_difference([values_of(one, "loss") for one in (point, plain)])
    return number(over.median / under.median), f"{apart:.1e}"


def overview(records: Sequence[TrainingRecord], drawn: PictureContext[TrainingTables]) -> Overview:
    """Return throughput and efficiency over devices and, of one record, its losses."""
    return Overview(charts=tuple(_charts(records, drawn)) if records else (), rates=rates(records, drawn))


def _charts(records: Sequence[TrainingRecord], drawn: PictureContext[TrainingTables]) -> Iterator[Chart]:
    formula, own = records[0].part.shape.formula, drawn.recipe.tables.training.model
    models = tuple(dict.fromkeys((own, *(one.part.training.model for one in records))))
    shares, speeds = (
        [one for place, record in enumerate(records) if (one := _curve(record, place, metric))]
        for metric in ("model-flops-share", "tokens-per-second")
    )
    axes: dict[str, Any] = {"x_label": "devices", "x_scale": "log2"}
    if shares:
        yield LineChart(
            name="throughput",
            title="Share of the dense peak, published and measured",
            y_label=f"MFU ({formula})",
            y_scale="share",
            curves=(*shares, *published_curves(drawn, formula, models)),
            notes=(
                "MFU is model FLOP/s over the dense bf16 peak of the same device or card; zero-based axis.",
            ),
            **axes,
        )
    elif speeds:
        yield LineChart(
            name="throughput",
            title="Throughput of one device",
            y_label="tokens/s per device",
            y_scale="count",
            curves=tuple(speeds),
            notes=("MFU is not known here, so nothing published can be drawn beside it.",),
            **axes,
        )
    scaled = [one for one in speeds if len(one.spots) > 1] if any(one.gpu for one in records) else []
    if scaled:
        theirs = [one for one in published_curves(drawn, formula, ()) if len(one.spots) > 1]
        yield LineChart(
            name="efficiency",
            title="What scaling keeps of it",
            y_label="throughput per device, relative",
            y_scale="relative",
            curves=tuple(map(_relative, (*scaled, *theirs))),
            notes=("Each series is relative to its own smallest point; the axis does not start at zero.",),
            **axes,
        )
    if len(records) == 1:
        yield from _losses(records[0], drawn.recipe.published)


def _curve(record: TrainingRecord, place: int, metric: str) -> Curve | None:
    # A leg on the processor of a machine with GPUs says nothing of them.
    points = [one for one in record.points if not (record.gpu and (leg := one.part.leg) and leg.processor)]
    spots = [sampled(point.devices, one) for point in points if (one := point.measurement(metric))]
    label = f"{record.label}, {record.part.training.model}{record.part.variant}"
    return curve(label, "measured", place, spots, f"run {record.run}") if spots else None


def _relative(one: Curve) -> Curve:
    first = one.spots[0].value
    spots = (Spot(x=s.x, value=s.value / first, low=s.low / first, high=s.high / first) for s in one.spots)
    return one.model_copy(update={"spots": tuple(spots)})


def _losses(record: TrainingRecord, published: PublishedClaims) -> Iterator[Chart]:
    points = [point for point in whole(record.points, lambda one: one.part.leg) if values_of(point, "loss")]
    if not points:
        return
    note = distance_in_words(points, "loss")
    yield series_chart(points, "loss", title="Loss at every point", label=LOSS, note=note)
    if len(points) > 1 and any(one.is_distance and one.metric == "loss" for one in published.claim):
        first, last = (loss_of(record.part, point) for point in (points[0], points[-1]))
        if first and last:
            yield from parity_charts(parity(first, last), first, last, metric="loss", label=LOSS)
