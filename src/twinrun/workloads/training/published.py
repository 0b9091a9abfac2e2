"""What was published of a training recipe, beside what was measured: curves, and which hardware to choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from twinrun.foundation.text import number, percent, plural
from twinrun.manifests.claims import Claim
from twinrun.manifests.published import Reference
from twinrun.manifests.vendor import Gpu
from twinrun.workloads.tables_and_charts import ABSENT, Cell, Column, Curve, Spot, Table, text
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint, TrainingTables
from twinrun.workloads.workload import PictureContext, RecordView

Number = TypeVar("Number", Claim, Reference)
TOKENS = ("tokens-per-second", "tokens/s")
TERA = 1e12
# More curves than these tell nothing apart.
MAX_REFERENCES = 8
# Joules of a kilowatt-hour.
KILOWATT_HOUR = 3.6e6
COLUMNS = (
    "hardware",
    "model",
    "TFLOP/s\nper card",
    "share of\npeak",
    "tokens/s\nper card",
    "W per\ncard",
    "million tokens\nper kWh",
)


def published_curves(
    drawn: PictureContext[TrainingTables], formula: str, models: Sequence[str], *, share: bool
) -> list[Curve]:
    """Return the claims and the references in a formula.

    Args:
        models: whose references are drawn; of the published one alone where there are many.
        share: of the dense peak, instead of TFLOP/s of a card.
    """
    claims = absolute_claims(drawn, formula)
    model = drawn.recipe.tables.training.model
    others = _grouped(references(drawn, formula), models)
    if len(others) > MAX_REFERENCES:
        others = {key: group for key, group in others.items() if key[1] == model}
    return [
        *(
            _claimed_curve(drawn.gpus[gpu], group, place, model, share)
            for place, (gpu, group) in enumerate(claims)
        ),
        *(
            _reference_curve(drawn.gpus[gpu], group, place, share)
            for place, ((gpu, _), group) in enumerate(others.items())
        ),
    ]


def _grouped(
    published: Sequence[Reference], models: Sequence[str]
) -> dict[tuple[str, str], tuple[Reference, ...]]:
    """Return the references of each GPU and model, in the order of `models`: the fastest of each size."""
    found: dict[tuple[str, str], dict[int, Reference]] = {}
    for model in models:
        for one in published:
            if one.model == model:
                sizes = found.setdefault((one.gpu, model), {})
                if one.cards not in sizes or one.value > sizes[one.cards].value:
                    sizes[one.cards] = one
    return {key: tuple(one for _, one in sorted(sizes.items())) for key, sizes in found.items()}


def references(drawn: PictureContext[TrainingTables], formula: str) -> list[Reference]:
    """Return the references in a formula and in the precision of the published configuration."""
    precision = drawn.recipe.tables.training.precision
    found = (_in_flops(one, one.model, one.cards, 1, drawn) for one in drawn.recipe.published.reference)
    return [one for one in found if (one.formula, one.precision) == (formula, precision)]


def absolute_claims(drawn: PictureContext[TrainingTables], formula: str) -> list[tuple[str, list[Claim]]]:
    """Return by GPU model the absolute claims in a formula about the recipe's own configuration."""
    claims: dict[str, list[Claim]] = {}
    model = drawn.recipe.tables.training.model
    for one in drawn.recipe.published.claim:
        if one.kind == "absolute" and one.hardware and one.configuration is None:
            claim = _in_flops(one, model, one.hardware.cards, one.hardware.nodes, drawn)
            if claim.formula == formula:
                claims.setdefault(one.hardware.gpu, []).append(claim)
    return list(claims.items())


def _in_flops(
    published: Number, model: str, cards: int, nodes: int, drawn: PictureContext[TrainingTables]
) -> Number:
    """Return a published number of tokens/s as model FLOP/s of a card, and any other as it is."""
    shape, gpu = drawn.recipe.tables.models.get(model), drawn.gpus.get(_gpu_of(published))
    if shape is None or gpu is None or (published.metric, published.unit) != TOKENS:
        return published
    per_card = {"device": gpu.devices_per_card, "card": 1, "node": nodes / cards, "run": 1 / cards}
    rate = published.value * per_card[published.per] * shape.flops_per_token() / TERA
    where = f"{published.source.where}: {number(published.value)} {published.unit} per {published.per}"
    source = published.source.model_copy(update={"where": where})
    changed = {"metric": "model-flops", "unit": "TFLOP/s", "per": "card", "formula": shape.formula}
    return published.model_copy(update={**changed, "value": rate, "source": source})


def _gpu_of(published: Claim | Reference) -> str:
    if isinstance(published, Reference):
        return published.gpu
    return published.hardware.gpu if published.hardware else ""


def of_a_card(value: float, per: str, gpu: Gpu) -> float:
    """Return the TFLOP/s of a card where a published number counts a card or a device."""
    return value * (1 if per == "card" else gpu.devices_per_card)


def _claimed_curve(gpu: Gpu, claims: Sequence[Claim], place: int, model: str, share: bool) -> Curve:
    spots = [
        _exact(claim.hardware.cards * gpu.devices_per_card, _value(claim, gpu, share))
        for claim in claims
        if claim.hardware
    ]
    values = ", ".join(f"{number(claim.value)} {claim.unit} per {claim.per}" for claim in claims)
    return Curve(
        label=f"published: {gpu.name}, {model}",
        kind="published",
        place=place,
        spots=tuple(sorted(spots, key=lambda spot: spot.x)),
        detail=f"{values}; {number(gpu.peak_bf16_tflops)} TFLOP/s dense bf16 per card",
    )


def _reference_curve(gpu: Gpu, group: Sequence[Reference], place: int, share: bool) -> Curve:
    shares = [_value(one, gpu, True) for one in group]
    ends = " to ".join(dict.fromkeys(percent(one) for one in (min(shares), max(shares))))
    tables = dict.fromkeys(f"{one.source.document}, {one.source.where}" for one in group)
    further = f", and {plural(len(tables) - 1, 'more row')}" if len(tables) > 1 else ""
    return Curve(
        label=f"published elsewhere: {gpu.name}, {group[0].model}",
        kind="reference",
        place=place,
        spots=tuple(_exact(one.cards * gpu.devices_per_card, _value(one, gpu, share)) for one in group),
        detail=(
            f"{ends} of {number(gpu.peak_bf16_tflops)} TFLOP/s dense bf16 per card;"
            f" {next(iter(tables))}{further}"
        ),
    )


def _value(published: Claim | Reference, gpu: Gpu, share: bool) -> float:
    rate = of_a_card(published.value, published.per, gpu)
    return rate / gpu.peak_bf16_tflops if share else rate


def _exact(devices: int, value: float) -> Spot:
    return Spot(x=devices, value=value, low=value, high=value)


class _Row(NamedTuple):
    gpu: Gpu
    cards: float
    model: str
    rate: float
    """TFLOP/s of a card."""
    origin: str


def hardware_tables(
    records: Sequence[RecordView[TrainingPlan, TrainingPoint]], drawn: PictureContext[TrainingTables]
) -> tuple[Table, ...]:
    """Return the best published and the best measured row of each GPU and model.

    The first table is of models that a claim or a record here is of, the second of the others. Of a record
    the largest point counts.
    """
    tables = drawn.recipe.tables
    formula = tables.models[tables.training.model].formula
    claimed, measured = list(_claimed_rows(drawn, formula)), list(_measured_rows(records, drawn, formula))
    rows = [*_best([*claimed, *_reference_rows(drawn, formula)]), *_best(measured)]
    order = list(dict.fromkeys((tables.training.model, *tables.models, *(row.model for row in rows))))
    rows.sort(key=lambda row: order.index(row.model))
    named = {row.model for row in (*claimed, *measured)}
    first = [row for row in rows if row.model in named]
    others = [row for row in rows if row.model not in named]
    return tuple(
        _table(title, some, drawn, formula)
        for title, some in (
            ("Which hardware to choose: a card as published and as measured here", first),
            ("Models that were published and not measured here", others),
        )
        if some
    )


def _table(title: str, rows: Sequence[_Row], drawn: PictureContext[TrainingTables], formula: str) -> Table:
    models = drawn.recipe.tables.models
    return Table(
        title=title,
        columns=tuple(Column(title=title, numeric=place > 1) for place, title in enumerate(COLUMNS)),
        rows=tuple(
            _cells(row, models[row.model].flops_per_token() if row.model in models else None) for row in rows
        ),
        notes=_notes(formula, sorted({row.gpu.name for row in rows if row.gpu.power_w is None})),
    )


def _best(rows: Iterable[_Row]) -> list[_Row]:
    """Return the fastest row of each GPU and model."""
    best: dict[tuple[str, str], _Row] = {}
    for row in rows:
        key = (row.gpu.id, row.model)
        if key not in best or row.rate > best[key].rate:
            best[key] = row
    return list(best.values())


def _notes(formula: str, lacking: Sequence[str]) -> tuple[str, ...]:
    notes = (
        "Of each GPU and model the fastest that was published, and the fastest that was measured.",
        f"TFLOP/s: {formula}; share: of the dense bf16 peak; tokens/s: TFLOP/s over FLOP of a token.",
        f"Tokens per kWh of TDP = tokens/s per card / W per card x {KILOWATT_HOUR:,.0f}.",
        "W: the most a card draws by its data sheet; none was measured, the rest of the node is left out.",
    )
    return (*notes, f"No power is given for {', '.join(lacking)}.") if lacking else notes


def _claimed_rows(drawn: PictureContext[TrainingTables], formula: str) -> Iterator[_Row]:
    model = drawn.recipe.tables.training.model
    for gpu_id, claims in absolute_claims(drawn, formula):
        gpu = drawn.gpus[gpu_id]
        for claim in claims:
            if claim.hardware:
                rate = of_a_card(claim.value, claim.per, gpu)
                where = f"published: {claim.source.document}, {claim.source.where}"
                yield _Row(gpu, claim.hardware.cards, model, rate, where)


def _reference_rows(drawn: PictureContext[TrainingTables], formula: str) -> Iterator[_Row]:
    for one in references(drawn, formula):
        gpu = drawn.gpus[one.gpu]
        where = f"published elsewhere: {one.source.where}"
        yield _Row(gpu, one.cards, one.model, of_a_card(one.value, one.per, gpu), where)


def _measured_rows(
    records: Sequence[RecordView[TrainingPlan, TrainingPoint]],
    drawn: PictureContext[TrainingTables],
    formula: str,
) -> Iterator[_Row]:
    for record in records:
        points = [point for point in record.points if point.measurement("model-flops")]
        if record.gpu is None or not points or record.part.shape.formula != formula:
            continue
        point = max(points, key=lambda one: one.devices)
        found = point.measurement("model-flops")
        assert found
        dies, model = record.gpu.devices_per_card, record.part.training.model
        origin = f"{record.evidence}, {point.id}{record.part.variant}: run {record.run}"
        # The row of today has what the record's copy of it may lack.
        gpu = drawn.gpus.get(record.gpu.id, record.gpu)
        yield _Row(gpu, point.devices / dies, model, found.median * dies, origin)


def _cells(row: _Row, flops_per_token: float | None) -> tuple[Cell, ...]:
    tokens = row.rate * TERA / flops_per_token if flops_per_token else None
    power = row.gpu.power_w
    energy = tokens / power * KILOWATT_HOUR / 1e6 if tokens and power else None
    return (
        text(f"{row.cards:g} x {row.gpu.name}", row.origin),
        text(row.model),
        text(number(row.rate)),
        text(percent(row.rate / row.gpu.peak_bf16_tflops)),
        text(f"{tokens:,.0f}" if tokens else ABSENT),
        text(number(power) if power else ABSENT),
        text(f"{energy:.1f}" if energy else ABSENT),
    )
