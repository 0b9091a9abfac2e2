"""One run of a training beside what was published of its model: an answer where claims need several runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from twinrun.foundation.text import number, percent
from twinrun.manifests.vendor import Gpu
from twinrun.workloads.tables_and_charts import ABSENT, Cell, Column, Table, text
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint, TrainingTables
from twinrun.workloads.training.published import TERA, of_a_card, references
from twinrun.workloads.workload import PictureContext, RecordView

COLUMNS = (
    Column(title="hardware", numeric=False),
    Column(title="TFLOP/s\nper card"),
    Column(title="share of\npeak"),
    Column(title="tokens/s\nper card"),
    Column(title="speed here\nover it"),
    Column(title="share here\nover it"),
)


class _PublishedRow(NamedTuple):
    """A published row of the model, in TFLOP/s of a card."""

    gpu: Gpu
    cards: int
    rate: float
    where: str


def beside(
    record: RecordView[TrainingPlan, TrainingPoint], drawn: PictureContext[TrainingTables]
) -> Table | None:
    """Return the record's largest point and the published rows of its model; None where there is neither.

    Of the same GPU every row is shown, of each other GPU the fastest.
    """
    points = [point for point in record.points if point.measurement("model-flops")]
    if record.gpu is None or not points:
        return None
    point = max(points, key=lambda one: one.devices)
    here = point.measurement("model-flops")
    assert here
    gpu, shape, model = record.gpu, record.part.shape, record.part.training.model
    rate, cards = here.median * gpu.devices_per_card, point.devices / gpu.devices_per_card
    rows = list(_rows(drawn, shape.formula, model))
    own = sorted((row for row in rows if row.gpu.id == gpu.id), key=lambda row: (row.cards, -row.rate))
    others = [row for row in _fastest(rows) if row.gpu.id != gpu.id]
    flops = shape.flops_per_token()
    first = (text(f"{cards:g} x {gpu.name}", f"here, {point.id}{record.part.variant}"),)
    measured = (*first, *_numbers(rate, gpu, flops), text(ABSENT), text(ABSENT))
    return Table(
        title=f"{model} on one card, here and as published",
        columns=COLUMNS,
        rows=(measured, *(_cells(row, flops, rate=rate, gpu=gpu) for row in (*own, *others))),
        notes=tuple(_notes(drawn, shape.formula, gpu, own=bool(own))),
    )


def _rows(drawn: PictureContext[TrainingTables], formula: str, model: str) -> Iterator[_PublishedRow]:
    for one in references(drawn, formula):
        if one.model == model:
            gpu = drawn.gpus[one.gpu]
            where = f"{one.label}: {one.source.where}"
            yield _PublishedRow(gpu, one.cards, of_a_card(one.value, one.per, gpu), where)


def _fastest(rows: Sequence[_PublishedRow]) -> list[_PublishedRow]:
    found: dict[str, _PublishedRow] = {}
    for row in rows:
        if row.gpu.id not in found or row.rate > found[row.gpu.id].rate:
            found[row.gpu.id] = row
    return list(found.values())


def _cells(row: _PublishedRow, flops: int, *, rate: float, gpu: Gpu) -> tuple[Cell, ...]:
    share = (rate / gpu.peak_bf16_tflops) / (row.rate / row.gpu.peak_bf16_tflops)
    return (
        text(f"{row.cards:g} x {row.gpu.name}", row.where),
        *_numbers(row.rate, row.gpu, flops),
        text(f"{rate / row.rate:.2f}"),
        text(f"{share:.2f}"),
    )


def _numbers(rate: float, gpu: Gpu, flops: int) -> tuple[Cell, ...]:
    share = percent(rate / gpu.peak_bf16_tflops)
    return text(number(rate)), text(share), text(f"{rate * TERA / flops:,.0f}")


def _notes(drawn: PictureContext[TrainingTables], formula: str, gpu: Gpu, *, own: bool) -> Iterator[str]:
    yield f"TFLOP/s: {formula}; share: of the dense bf16 peak of a card."
    if not own:
        yield f"This model was not published on an {gpu.name}."
    published = drawn.recipe.published.between_records
    if published:
        yield "Published between hardware, which `invoke compare --claims` judges between records:"
    for claim in published:
        yield f"{claim.statement} ({claim.source.document}, {claim.source.where})"
