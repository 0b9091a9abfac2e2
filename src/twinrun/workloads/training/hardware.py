"""Which hardware to choose: published and measured throughput of a card, its peak and its power."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from twinrun.foundation.text import number, percent
from twinrun.manifests.vendor import Gpu
from twinrun.workloads.tables import ABSENT, Cell, Column, Table, text
from twinrun.workloads.training.manifest import TrainingPlan, tables_of
from twinrun.workloads.training.published_curves import absolute_claims, of_a_card, references
from twinrun.workloads.workload import PictureContext, RecordView

TERA = 1e12
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


class _Row(NamedTuple):
    gpu: Gpu
    cards: float
    model: str
    rate: float
    """TFLOP/s of a card."""
    origin: str


def hardware_tables(records: Sequence[RecordView], drawn: PictureContext) -> tuple[Table, ...]:
    """Return the best published and the best measured row of each GPU and model.

    The first table is of models that a claim or a record here is of, the second of the others. Of a record
    the largest point counts.
    """
    tables = tables_of(drawn.recipe)
    formula = tables.models[tables.training.model].formula
    claimed, measured = list(_claimed(drawn, formula)), list(_measured(records, drawn, formula))
    rows = [*_best([*claimed, *_references(drawn, formula)]), *_best(measured)]
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


def _table(title: str, rows: Sequence[_Row], drawn: PictureContext, formula: str) -> Table:
    models = tables_of(drawn.recipe).models
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


def _claimed(drawn: PictureContext, formula: str) -> Iterator[_Row]:
    model = tables_of(drawn.recipe).training.model
    for gpu_id, claims in absolute_claims(drawn, formula):
        gpu = drawn.gpus[gpu_id]
        for claim in claims:
            if claim.hardware:
                rate = of_a_card(claim.value, claim.per, gpu)
                where = f"published: {claim.source.document}, {claim.source.where}"
                yield _Row(gpu, claim.hardware.cards, model, rate, where)


def _references(drawn: PictureContext, formula: str) -> Iterator[_Row]:
    for one in references(drawn, formula):
        gpu = drawn.gpus[one.gpu]
        where = f"published elsewhere: {one.source.where}"
        yield _Row(gpu, one.cards, one.model, of_a_card(one.value, one.per, gpu), where)


def _measured(records: Sequence[RecordView], drawn: PictureContext, formula: str) -> Iterator[_Row]:
    for record in records:
        points = [point for point in record.points if point.measurement("model-flops")]
        assert isinstance(record.part, TrainingPlan)
        if record.gpu is None or not points or record.part.shape.formula != formula:
            continue
        point = max(points, key=lambda one: one.devices)
        found = point.measurement("model-flops")
        assert found
        dies, model = record.gpu.devices_per_card, record.part.training.model
        origin = f"measured, {point.id}{record.part.variant}: run {record.run}"
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
