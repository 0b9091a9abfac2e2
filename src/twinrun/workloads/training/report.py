"""What a training record shows: a table of its points and layouts, scaling curves, loss curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twinrun.foundation.text import number
from twinrun.manifests.published import PublishedClaims
from twinrun.workloads.curve_charts import distance_in_words, parity_charts, series_chart
from twinrun.workloads.curve_distance import largest_difference, parity, values_of
from twinrun.workloads.tables_and_charts import (
    ABSENT,
    Chart,
    Column,
    Curve,
    LineChart,
    Spot,
    Table,
    measured,
    text,
    word_columns,
)
from twinrun.workloads.training.comparison import loss_of
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint, TrainingTables
from twinrun.workloads.training.numbers import VALIDATION
from twinrun.workloads.training.prediction import predicted_table
from twinrun.workloads.training.rates import published_curves, rates
from twinrun.workloads.workload import MeasuredPoint, Overview, PictureContext, RecordView, whole

TrainingRecord = RecordView[TrainingPlan, TrainingPoint]
LOSS = "loss, nats/token"
# Columns of the points: heading, measurement, and whether it is a share.
POINTS = (
    ("tokens/s\nper device", "tokens-per-second", False),
    ("model TFLOP/s\nper device", "model-flops", False),
    ("MFU", "model-flops-share", True),
    ("s/step", "step-time", False),
    ("GiB per\ndevice", "peak-memory", False),
    ("last loss\nnats/token", "loss", False),
    ("W per\ndevice", "power", False),
    ("tokens/s\nper watt", "tokens-per-second-per-watt", False),
)
LAYOUTS = (
    ("state, B per\nparameter", "state-memory"),
    ("over\nformula", "state-of-formula"),
    ("sent, numbers\nper parameter", "traffic"),
    ("over\nformula ", "traffic-of-formula"),
)


def show(record: TrainingRecord) -> tuple[Table, ...]:
    """Return a table of the points, of what was predicted of them, and of what layouts do."""
    shown = [one for one in POINTS if any(point.measurement(one[1]) for point in record.points)]
    points = Table(
        title="Points: median of the timed steps, and how far the farthest is from it",
        columns=(
            *word_columns("point"),
            *(Column(title=one) for one in ("micro-\nbatch", *(c[0] for c in shown))),
        ),
        rows=tuple(
            (
                text(point.id, point.result.parallelism),
                text(str(point.result.microbatch)),
                *(measured(point.measurement(name), share=share) for _, name, share in shown),
            )
            for point in record.points
        ),
        notes=tuple(_notes(record)),
    )
    return (points, *predicted_table(record), *_layouts(record.points))


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


def _layouts(points: Sequence[MeasuredPoint[TrainingPoint]]) -> Iterator[Table]:
    """Yield the layouts beside plain data parallelism of the same model; nothing of a sweep over sizes."""
    if not any(point.part.layout for point in points):
        return
    plains = [point for point in reversed(points) if (at := point.part.layout) and at.plain]
    plain = {point.part.shape: point for point in plains}
    heads = (
        "ranks",
        "tokens/s over\nbaseline's",
        "loss: largest\ndifference",
        *(head for head, _ in LAYOUTS),
    )
    yield Table(
        title="Layouts beside PyTorch's own data parallelism of the same model",
        columns=(*word_columns("layout"), *(Column(title=head) for head in heads)),
        rows=tuple(
            (
                text(point.id, point.result.parallelism),
                text(str(point.devices)),
                *map(text, _beside(point, plain.get(point.part.shape))),
                *(measured(point.measurement(name)) for _, name in LAYOUTS),
            )
            for point in points
        ),
        notes=(
            "tokens/s are per device, so a ratio compares layouts of the same or another number of ranks.",
            "Of the first rank, between two steps and in one, over the parameters of its part of the model.",
            "Formulas: ZeRO's paper, arXiv:1910.02054, sections 5 and 7; none where activations are sent.",
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
    formula = records[0].part.shape.formula
    models = tuple(
        dict.fromkeys((drawn.recipe.tables.training.model, *(one.part.training.model for one in records)))
    )
    shares = [
        one for place, record in enumerate(records) if (one := _curve(record, place, "model-flops-share"))
    ]
    speeds = [
        one for place, record in enumerate(records) if (one := _curve(record, place, "tokens-per-second"))
    ]
    if shares:
        published = published_curves(drawn, formula, models, share=True)
        note = "MFU is model FLOP/s over the dense bf16 peak of the same device or card; zero-based axis."
        title = "Share of the dense peak, published and measured"
        yield _over_devices("throughput", title, f"MFU ({formula})", "share", [*shares, *published], note)
    elif speeds:
        note = "MFU is not known here, so nothing published can be drawn beside it."
        yield _over_devices(
            "throughput", "Throughput of one device", "tokens/s per device", "count", speeds, note
        )
    scaled = [one for one in speeds if len(one.spots) > 1] if any(one.gpu for one in records) else []
    if scaled:
        theirs = [one for one in published_curves(drawn, formula, (), share=True) if len(one.spots) > 1]
        note = "Each series is relative to its own smallest point; the axis does not start at zero."
        curves, label = [_relative(one) for one in (*scaled, *theirs)], "throughput per device, relative"
        yield _over_devices("efficiency", "What scaling keeps of it", label, "relative", curves, note)
    if len(records) == 1:
        yield from _losses(records[0], drawn.recipe.published)


def _over_devices(  # noqa: PLR0917 - in the order of the picture
    name: str, title: str, label: str, scale: str, curves: Sequence[Curve], note: str
) -> LineChart:
    axes = {"x_label": "devices", "x_scale": "log2", "y_label": label, "y_scale": scale}
    return LineChart.model_validate(
        {"name": name, "title": title, "curves": tuple(curves), "notes": (note,), **axes}
    )


def _curve(record: TrainingRecord, place: int, metric: str) -> Curve | None:
    # A leg on the processor of a machine with GPUs says nothing of them.
    points = [one for one in record.points if not (record.gpu and (leg := one.part.leg) and leg.processor)]
    found = [(point.devices, one) for point in points if (one := point.measurement(metric))]
    spots = (Spot(x=x, value=one.median, low=one.low, high=one.high) for x, one in found)
    label = f"{record.label}, {record.part.training.model}{record.part.variant}"
    ordered = tuple(sorted(spots, key=lambda spot: spot.x))
    detail = f"run {record.run}"
    return Curve(label=label, kind="measured", place=place, spots=ordered, detail=detail) if ordered else None


def _relative(curve: Curve) -> Curve:
    first = min(curve.spots, key=lambda spot: spot.x).value
    spots = (Spot(x=s.x, value=s.value / first, low=s.low / first, high=s.high / first) for s in curve.spots)
    return curve.model_copy(update={"spots": tuple(spots)})


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
