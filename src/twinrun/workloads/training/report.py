"""What a training record shows: a table of its points, scaling curves, loss curves."""

from __future__ import annotations

from collections.abc import Sequence

from twinrun.foundation.text import number, plain
from twinrun.manifests.published import PublishedClaims
from twinrun.protocol.measurements import Measurement
from twinrun.workloads.curve_charts import distance_in_words, distances, parity_charts, series_chart
from twinrun.workloads.curve_distance import parity
from twinrun.workloads.tables_and_charts import Chart, Column, Curve, LineChart, Spot, Table, measured, text
from twinrun.workloads.training.comparison import loss_of
from twinrun.workloads.training.layout_tables import layout_tables
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint, TrainingTables
from twinrun.workloads.training.numbers import VALIDATION
from twinrun.workloads.training.prediction import predicted_table
from twinrun.workloads.training.rates import beside, hardware_tables, published_curves, rates
from twinrun.workloads.workload import MeasuredPoint, Overview, PictureContext, RecordView, whole

LOSS = "loss, nats/token"
COLUMNS = (
    Column(title="point", numeric=False),
    Column(title="micro-\nbatch"),
    Column(title="tokens/s\nper device"),
    Column(title="model TFLOP/s\nper device"),
    Column(title="MFU"),
    Column(title="s/step"),
    Column(title="GiB per\ndevice"),
    Column(title="last loss\nnats/token"),
)
POWER_COLUMNS = (Column(title="W per\ndevice"), Column(title="tokens/s\nper watt"))
POWER_MEASUREMENTS = ("power", "tokens-per-second-per-watt")


def show(record: RecordView[TrainingPlan, TrainingPoint]) -> tuple[Table, ...]:
    """Return a table of the points, of what was predicted of them, and two of what layouts do."""
    return (_points_table(record), *predicted_table(record), *layout_tables(record))


def overview(
    records: Sequence[RecordView[TrainingPlan, TrainingPoint]], drawn: PictureContext[TrainingTables]
) -> Overview:
    """Return the pictures of `records`, and published and measured hardware side by side."""
    charts = _charts(records, drawn) if records else ()
    alone = beside(records[0], drawn) if len(records) == 1 else None
    return Overview(
        charts=charts,
        tables=hardware_tables(records, drawn),
        rates=rates(records, drawn),
        beside=alone,
    )


def _points_table(record: RecordView[TrainingPlan, TrainingPoint]) -> Table:
    """Return a row for each point; power has columns where some point has it."""
    sampled = any(point.measurement("power") for point in record.points)
    return Table(
        title="Points: median of the timed steps, and how far the farthest is from it",
        columns=(*COLUMNS, *POWER_COLUMNS) if sampled else COLUMNS,
        rows=tuple(
            (
                text(point.id, point.result.parallelism),
                text(str(point.result.microbatch)),
                measured(point.measurement("tokens-per-second")),
                measured(point.measurement("model-flops")),
                measured(point.measurement("model-flops-share"), share=True),
                measured(point.measurement("step-time")),
                measured(point.measurement("peak-memory")),
                text(f"{loss.median:.4f}" if (loss := point.measurement("loss")) else "-"),
                *(measured(point.measurement(name)) for name in POWER_MEASUREMENTS if sampled),
            )
            for point in record.points
        ),
        notes=_notes(record),
    )


def _notes(record: RecordView[TrainingPlan, TrainingPoint]) -> tuple[str, ...]:
    counts = record.part.shape.flops_by_formula()
    (formula, least), *others = counts.items()
    notes = [f"model FLOP/s: {formula}"]
    notes += [f"by {name}: {more / least:.3f} times as many" for name, more in others]
    measured_at = ((point.id, one) for point in record.points for one in point.measurements)
    last = {name: one for name, one in measured_at if one.metric == VALIDATION}
    notes += [f"{one.id} of {name}: {one.median:.4f} nats/token" for name, one in last.items()]
    powered = [point.result.power.sensor for point in record.points if point.measurement("power")]
    notes += sorted({f"W: {sensor}" for sensor in powered if sensor})
    if record.gpu and any(point.measurement("model-flops-share") for point in record.points):
        peak = number(record.gpu.peak_bf16_tflops / record.gpu.devices_per_card)
        return (*notes, f"MFU: over {peak} TFLOP/s dense bf16 per device ({record.gpu.source})")
    return (*notes, "MFU: no dense peak is known for this device in this precision")


def _charts(
    records: Sequence[RecordView[TrainingPlan, TrainingPoint]], drawn: PictureContext[TrainingTables]
) -> tuple[Chart, ...]:
    """Return throughput, share of the peak and efficiency over devices and, of one record, its losses."""
    rates = [_per_card(records, drawn)] if any(record.gpu for record in records) else []
    found: list[Chart] = [
        one for one in (*rates, _throughput(records, drawn), _efficiency(records, drawn)) if one.curves
    ]
    if len(records) == 1:
        found += _losses(records[0], drawn.recipe.published)
    return tuple(found)


def _per_card(
    records: Sequence[RecordView[TrainingPlan, TrainingPoint]], drawn: PictureContext[TrainingTables]
) -> LineChart:
    """Return model FLOP/s of a card over devices, published and measured."""
    formula = records[0].part.shape.formula
    curves = [
        _of_cards(_curve(record, place, "model-flops"), record)
        for place, record in enumerate(records)
        if record.gpu
    ]
    every = [*curves, *published_curves(drawn, formula, _models(records, drawn), share=False)]
    label = "model TFLOP/s per card"
    notes = (f"FLOP by {formula}; a card of two dies is two devices; zero-based axis.",)
    return _chart("per-card", "Throughput of one card, published and measured", label, "count", every, notes)


def _of_cards(curve: Curve, record: RecordView[TrainingPlan, TrainingPoint]) -> Curve:
    dies = record.gpu.devices_per_card if record.gpu else 1
    return _scaled(curve, dies)


def _models(
    records: Sequence[RecordView[TrainingPlan, TrainingPoint]], drawn: PictureContext[TrainingTables]
) -> tuple[str, ...]:
    """Return the models of the records, the published one first."""
    shown = (record.part.training.model for record in records)
    return tuple(dict.fromkeys((drawn.recipe.tables.training.model, *shown)))


def _throughput(
    records: Sequence[RecordView[TrainingPlan, TrainingPoint]], drawn: PictureContext[TrainingTables]
) -> LineChart:
    """Return MFU over devices, which a card of two devices and a device have in common; else tokens/s."""
    shares = [_curve(record, place, "model-flops-share") for place, record in enumerate(records)]
    known = [one for one in shares if one.spots]
    if not known:
        rates = [_curve(record, place, "tokens-per-second") for place, record in enumerate(records)]
        note = "MFU is not known here, so nothing published can be drawn beside it."
        return _chart(
            "throughput", "Throughput of one device", "tokens/s per device", "count", rates, (note,)
        )
    formula = records[0].part.shape.formula
    left_out = ", ".join(one.label for one in shares if not one.spots)
    notes = (
        "MFU is model FLOP/s over the dense bf16 peak of the same device or card; zero-based axis.",
        *_other_model(records, drawn.recipe.published),
        *([f"Not drawn, for want of an MFU by this formula: {left_out}."] if left_out else []),
    )
    curves = [*known, *published_curves(drawn, formula, _models(records, drawn), share=True)]
    title = "Share of the dense peak, published and measured"
    return _chart("throughput", title, f"MFU ({formula})", "share", curves, notes)


def _efficiency(
    records: Sequence[RecordView[TrainingPlan, TrainingPoint]], drawn: PictureContext[TrainingTables]
) -> LineChart:
    """Return throughput per device relative to the smallest point, without ranks that share a processor."""
    ours = [_curve(record, place, "tokens-per-second") for place, record in enumerate(records) if record.gpu]
    several = [one for one in ours if len(one.spots) > 1]
    formula = records[0].part.shape.formula
    published = published_curves(drawn, formula, (), share=True) if several else []
    theirs = [one for one in published if len(one.spots) > 1]
    note = "Each series is relative to its own smallest point; the axis does not start at zero."
    title, label = "What scaling keeps of it", "throughput per device, relative"
    return _chart(
        "efficiency", title, label, "relative", [_relative(one) for one in [*several, *theirs]], (note,)
    )


def _chart(  # noqa: PLR0917 - in the order of the picture
    name: str, title: str, label: str, scale: str, curves: Sequence[Curve], notes: tuple[str, ...]
) -> LineChart:
    return LineChart.model_validate(
        {
            "name": name,
            "title": title,
            "x_label": "devices",
            "x_scale": "log2",
            "y_label": label,
            "y_scale": scale,
            "curves": tuple(curves),
            "notes": notes,
        }
    )


def _curve(record: RecordView[TrainingPlan, TrainingPoint], place: int, metric: str) -> Curve:
    part = record.part
    # A leg on the processor of a machine with GPUs says nothing of them.
    points = [one for one in record.points if not (record.gpu and (leg := one.part.leg) and leg.processor)]
    points.sort(key=lambda point: point.devices)
    found = [(point, one) for point in points if (one := point.measurement(metric))]
    return Curve(
        label=f"{record.label}, {part.training.model}{part.variant}",
        kind="measured",
        place=place,
        spots=tuple(_spot(point, one) for point, one in found),
        detail=f"run {record.run}",
    )


def _spot(point: MeasuredPoint[TrainingPoint], found: Measurement) -> Spot:
    return Spot(x=point.devices, value=found.median, low=found.low, high=found.high)


def _relative(curve: Curve) -> Curve:
    return _scaled(curve, 1 / min(curve.spots, key=lambda spot: spot.x).value)


def _scaled(curve: Curve, factor: float) -> Curve:
    spots = tuple(
        Spot(x=one.x, value=one.value * factor, low=one.low * factor, high=one.high * factor)
        for one in curve.spots
    )
    return curve.model_copy(update={"spots": spots})


def _other_model(
    records: Sequence[RecordView[TrainingPlan, TrainingPoint]], published: PublishedClaims
) -> list[str]:
    theirs = published.fingerprint.get("parameters")
    ours = sorted({record.part.shape.parameters() for record in records})
    if not isinstance(theirs, int) or ours == [theirs]:
        return []
    return [
        f"The published model has {plain(theirs)} parameters; measured here: {', '.join(map(plain, ours))}."
    ]


def _losses(record: RecordView[TrainingPlan, TrainingPoint], published: PublishedClaims) -> list[Chart]:
    points = [
        point
        for point in whole(record.points, lambda one: one.part.leg)
        if (curve := point.one_series("loss")) and curve.values
    ]
    if not points:
        return []
    note = distance_in_words(points, "loss")
    found: list[Chart] = [series_chart(points, "loss", title="Loss at every point", label=LOSS, note=note)]
    claims = [claim for claim in published.claim if claim.is_distance and claim.metric == "loss"]
    allowed = [claim.tolerance for claim in claims if claim.kind == "invariant"]
    if len(points) > 1 and allowed:
        apart = distances(points, "loss", limit=min(allowed), title="How far the losses are apart")
        found += [apart] if apart.curves[0].spots else []
    if len(points) > 1 and any(claim.kind == "parity" for claim in claims):
        first, last = (loss_of(record.part, point) for point in (points[0], points[-1]))
        if first and last:
            found += parity_charts(parity(first, last), first, last, metric="loss", label=LOSS)
    return found
