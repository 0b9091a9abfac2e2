"""What a training record shows: a table of its points, speeds beside the published ones, loss curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from twinrun.foundation.text import TERA, number, percent, plural
from twinrun.manifests.published import PublishedClaims
from twinrun.workloads.curve_distance import loss_chart, parity, parity_charts, values_of
from twinrun.workloads.tables_and_charts import (
    Chart,
    Curve,
    CurveKind,
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
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint, TrainingTables
from twinrun.workloads.training.numbers import VALIDATION, loss_of
from twinrun.workloads.workload import CardRate, Overview, PictureContext, RecordView, whole

TrainingRecord = RecordView[TrainingPlan, TrainingPoint]
Context = PictureContext[TrainingTables]
TOKENS, FLOPS = ("tokens-per-second", "tokens/s"), ("model-flops", "TFLOP/s")
KINDS: dict[CurveKind, str] = {"published": "published", "reference": "published elsewhere"}
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


def show(record: TrainingRecord) -> tuple[Table, ...]:
    """Return a table of the points."""
    ids = {one.id for point in record.points for one in point.measurements}
    known = POINTS | {metric: metric for metric in record.part.training.reports}
    columns = {head: name for head, name in known.items() if name in ids}
    rows = tuple(
        (
            text(point.id, point.result.parallelism),
            text(str(point.result.microbatch)),
            *(measured(point.measurement(name), share=head == "MFU") for head, name in columns.items()),
        )
        for point in record.points
    )
    heads = (*word_columns("point"), *number_columns("micro-\nbatch", *columns))
    title = "Points: median of the timed steps, and how far the farthest is from it"
    return (Table(title=title, columns=heads, rows=rows, notes=tuple(_notes(record))),)


def _notes(record: TrainingRecord) -> Iterator[str]:
    (formula, least), *others = record.part.shape.flops_by_formula().items()
    yield f"model FLOP/s: {formula}"
    yield from (f"by {name}: {more / least:.3f} times as many" for name, more in others)
    for point in record.points:
        time, made = point.measurement("step-time"), point.planned.predicted
        for known in made[len(point.sent.attempts) : len(point.sent.attempts) + 1]:
            if time and known.seconds and known.covers:
                ends, off = " to ".join(map(number, known.covers)), known.seconds / time.median - 1
                yield f"predicted of {point.id}: {number(known.seconds)} s/step, {ends}: {off:+.1%}"
        for one in (one for one in point.measurements if one.metric == VALIDATION):
            yield f"{one.id} of {point.id}: {one.median:.4f} nats/token"
    powered = {point.result.power.sensor for point in record.points if point.measurement("power")}
    yield from sorted(f"W: {sensor}" for sensor in powered if sensor)
    if record.gpu and any(point.measurement("model-flops-share") for point in record.points):
        peak = number(record.gpu.peak_bf16_tflops / record.gpu.devices_per_card)
        yield f"MFU: over {peak} TFLOP/s dense bf16 per device ({record.gpu.source})"
    else:
        yield "MFU: no dense peak is known for this device in this precision"


def overview(records: Sequence[TrainingRecord], drawn: Context) -> Overview:
    """Return all speeds, throughput and efficiency over devices and, of one record, its losses."""
    rates = (*published_rates(drawn), *(rate for record in records for rate in _measured(record, drawn)))
    return Overview(charts=tuple(_charts(records, drawn)) if records else (), rates=rates)


def published_rates(drawn: Context) -> Iterator[CardRate]:
    """Yield the absolute claims about the recipe's own configuration, then references, as rates of a card."""
    asked, published = drawn.recipe.tables.training, drawn.recipe.published
    told: list[tuple[Any, ...]] = []
    for claim in published.claim:
        # A claim about another configuration has its number in a reference, under the name of its model.
        if claim.kind == "absolute" and claim.configuration is None and (at := claim.hardware):
            label = f"{at.software}, {at.cards:,} cards"
            told.append((claim, at.gpu, at.cards, at.nodes, "published", asked.model, asked.precision, label))
    for one in published.reference:
        told.append((one, one.gpu, one.cards, 1, "reference", one.model, one.precision, one.label))
    for row, gpu, cards, nodes, mark, model, precision, label in told:
        shape, card, kind = drawn.recipe.tables.models.get(model), drawn.gpus.get(gpu), (row.metric, row.unit)
        if card is None or (shape is None and kind == TOKENS) or kind not in (TOKENS, FLOPS):
            continue
        per_card = {"device": card.devices_per_card, "card": 1, "node": nodes / cards, "run": 1 / cards}
        value, source, where = row.value * per_card[row.per], row.source, row.source.where
        formula = shape.formula if shape and kind == TOKENS else row.formula or ""
        count = (shape.flops_by_formula() if shape else {}).get(formula)
        tokens, flops = value * TERA / count if count else None, value
        if count and kind == TOKENS:
            tokens, flops = value, value * count / TERA
            where += f": {number(row.value)} {row.unit} per {row.per}"
        speeds = (tokens, flops, formula, label)
        yield CardRate(mark, card, model, precision, cards, *speeds, source.document, where)


def _measured(record: TrainingRecord, drawn: Context) -> Iterator[CardRate]:
    """Yield the rate of each point of a record on GPUs; a point of a layout is no choice of hardware."""
    asked, label = record.part.training, f"{record.made}, {record.label}"
    for point in record.points if record.gpu else ():
        found, tokens = point.measurement(FLOPS[0]), point.measurement(TOKENS[0])
        if record.gpu and found and tokens and point.part.layout is None:
            card = drawn.gpus.get(record.gpu.id, record.gpu)
            each, formula = card.devices_per_card, record.part.shape.formula
            speeds = (tokens.median * each, found.median * each)
            cards = point.devices / each
            yield CardRate("measured", card, asked.model, asked.precision, cards, *speeds, formula, label)


def published_curves(drawn: Context, formula: str, models: Sequence[str]) -> Iterator[Curve]:
    """Yield the speeds in a formula and the published precision, by GPU and model: the fastest of each size.

    Args:
        models: those whose references are drawn.
    """
    asked, fastest = drawn.recipe.tables.training, dict[tuple[str, str, str], dict[float, CardRate]]()
    for one in published_rates(drawn):
        known = one.mark == "published" or one.model in models
        if known and (one.formula, one.precision) == (formula, asked.precision):
            sizes = fastest.setdefault((one.mark, one.gpu.id, one.model), {})
            sizes[one.cards] = max(sizes.get(one.cards, one), one, key=lambda rate: rate.flops)
    for kind, label in KINDS.items():
        groups = [[*sizes.values()] for (mark, _, _), sizes in fastest.items() if mark == kind]
        groups.sort(key=lambda group: models.index(group[0].model) if group[0].model in models else -1)
        for place, group in enumerate(groups):
            gpu, shares = group[0].gpu, [one.flops / one.gpu.peak_bf16_tflops for one in group]
            rows = dict.fromkeys(f"{one.document}, {one.where}" for one in group)
            ends = " to ".join(dict.fromkeys(map(percent, (min(shares), max(shares)))))
            peak = f"{number(gpu.peak_bf16_tflops)} TFLOP/s dense bf16 per card"
            detail = f"{ends} of {peak}; {next(iter(rows))}"
            detail += f", and {plural(len(rows) - 1, 'more row')}" if len(rows) > 1 else ""
            spots = map(exact, (one.cards * gpu.devices_per_card for one in group), shares)
            yield curve(f"{label}: {gpu.name}, {group[0].model}", kind, place, spots, detail)


def _charts(records: Sequence[TrainingRecord], drawn: Context) -> Iterator[Chart]:
    formula, own = records[0].part.shape.formula, drawn.recipe.tables.training.model
    models = tuple(dict.fromkeys((own, *(one.part.training.model for one in records))))
    shares = [one for place, record in enumerate(records) if (one := _curve(record, place))]
    theirs = [*published_curves(drawn, formula, models)] if shares else []
    axes: dict[str, Any] = {"x_label": "devices", "x_scale": "log2"}
    if shares:
        yield LineChart(
            name="throughput",
            title="Share of the dense peak, published and measured",
            y_label=f"MFU ({formula})",
            y_scale="share",
            curves=(*shares, *theirs),
            notes=("MFU is model FLOP/s over the dense bf16 peak of the same GPU; zero-based axis.",),
            **axes,
        )
    if any(len(one.spots) > 1 for one in shares):
        scaled = [one for one in (*shares, *theirs) if one.kind != "reference" and len(one.spots) > 1]
        yield LineChart(
            name="efficiency",
            title="What scaling keeps of it",
            y_label="throughput per device, relative",
            y_scale="relative",
            curves=tuple(map(_relative, scaled)),
            notes=("Each series is relative to its own smallest point; the axis does not start at zero.",),
            **axes,
        )
    if len(records) == 1:
        yield from _losses(records[0], drawn.recipe.published)


def _curve(record: TrainingRecord, place: int) -> Curve | None:
    measured_points = ((one.devices, one.measurement("model-flops-share")) for one in record.points)
    spots = [sampled(devices, one) for devices, one in measured_points if one]
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
    yield loss_chart(points, title="Loss at every point")
    if len(points) > 1 and any(one.is_distance and one.metric == "loss" for one in published.claim):
        first, last = (loss_of(record.part, point) for point in (points[0], points[-1]))
        if first and last:
            yield from parity_charts(parity(first, last), first, last)
