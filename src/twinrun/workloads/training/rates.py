"""Speeds of trainings, published beside measured, each as the rate of one card: rows and curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twinrun.foundation.text import TERA, number, percent, plural
from twinrun.manifests.claims import Claim
from twinrun.manifests.published import Reference
from twinrun.workloads.tables_and_charts import Curve, CurveKind, curve, exact
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint, TrainingTables
from twinrun.workloads.workload import CardRate, PictureContext, RecordView

TOKENS, FLOPS = ("tokens-per-second", "tokens/s"), ("model-flops", "TFLOP/s")
# More curves than these tell nothing apart.
MAX_REFERENCES = 8


def published_rates(drawn: PictureContext[TrainingTables]) -> Iterator[CardRate]:
    """Yield the absolute claims about the recipe's own configuration, then the references."""
    asked, published = drawn.recipe.tables.training, drawn.recipe.published
    for claim in published.claim:
        # A claim about another configuration has its number in a reference, under the name of its model.
        if claim.kind == "absolute" and (at := claim.hardware) and claim.configuration is None:
            found = _published(claim, at.gpu, asked.model, at.cards, at.nodes, drawn)
            label = f"{at.software}, {at.cards:,} cards"
            yield from (one._replace(precision=asked.precision, label=label) for one in found)
    for row in published.reference:
        found = _published(row, row.gpu, row.model, row.cards, 1, drawn)
        yield from (one._replace(mark="reference", precision=row.precision, label=row.label) for one in found)


def _published(  # noqa: PLR0917 - what is published, and what of it is not in one place
    row: Claim | Reference,
    gpu: str,
    model: str,
    cards: int,
    nodes: int,
    drawn: PictureContext[TrainingTables],
) -> Iterator[CardRate]:
    """Yield a published speed as that of a card; nothing where its GPU or model is unknown."""
    shape, card, kind = drawn.recipe.tables.models.get(model), drawn.gpus.get(gpu), (row.metric, row.unit)
    if card is None or (shape is None and kind == TOKENS) or kind not in (TOKENS, FLOPS):
        return
    per_card = {"device": card.devices_per_card, "card": 1, "node": nodes / cards, "run": 1 / cards}
    value, document, where = row.value * per_card[row.per], row.source.document, row.source.where
    formula = shape.formula if shape and kind == TOKENS else row.formula or ""
    count = (shape.flops_by_formula() if shape else {}).get(formula)
    tokens, flops = value * TERA / count if count else None, value
    if count and kind == TOKENS:
        tokens, flops = value, value * count / TERA
        where += f": {number(row.value)} {row.unit} per {row.per}"
    yield CardRate("published", card, model, "", cards, tokens, flops, formula, "", document, where)


def rates(
    records: Sequence[RecordView[TrainingPlan, TrainingPoint]], drawn: PictureContext[TrainingTables]
) -> tuple[CardRate, ...]:
    """Return all speeds that were published or measured; a point of a layout is no choice of hardware."""
    return (*published_rates(drawn), *(rate for record in records for rate in _measured(record, drawn)))


def _measured(
    record: RecordView[TrainingPlan, TrainingPoint], drawn: PictureContext[TrainingTables]
) -> Iterator[CardRate]:
    """Yield the rate of each point of a record on GPUs whose model FLOP/s were measured."""
    asked, label = record.part.training, f"{record.made}, {record.label}"
    for point in record.points if record.gpu else ():
        found, tokens = point.measurement(FLOPS[0]), point.measurement(TOKENS[0])
        if record.gpu and found and tokens and point.part.layout is None:
            card = drawn.gpus.get(record.gpu.id, record.gpu)
            each, formula = card.devices_per_card, record.part.shape.formula
            speeds = (tokens.median * each, found.median * each)
            cards = point.devices / each
            yield CardRate("measured", card, asked.model, asked.precision, cards, *speeds, formula, label)


def drawn_rates(drawn: PictureContext[TrainingTables], formula: str) -> list[CardRate]:
    """Return the published speeds in a formula and in the precision of the published configuration."""
    precision = drawn.recipe.tables.training.precision
    return [one for one in published_rates(drawn) if (one.formula, one.precision) == (formula, precision)]


def published_curves(
    drawn: PictureContext[TrainingTables], formula: str, models: Sequence[str]
) -> list[Curve]:
    """Return the claims of each GPU, and the references of each GPU and model: the fastest of each size.

    Args:
        models: those whose references are drawn; the published one alone where there are many.
    """
    claims: dict[tuple[str, str], list[CardRate]] = {}
    others: dict[tuple[str, str], dict[float, CardRate]] = {}
    for one in drawn_rates(drawn, formula):
        if one.mark == "published":
            claims.setdefault((one.gpu.id, one.model), []).append(one)
        elif one.model in models:
            sizes = others.setdefault((one.gpu.id, one.model), {})
            if one.cards not in sizes or one.flops > sizes[one.cards].flops:
                sizes[one.cards] = one
    own = drawn.recipe.tables.training.model
    if len(others) > MAX_REFERENCES:
        others = {key: sizes for key, sizes in others.items() if key[1] == own}
    keys = sorted(others, key=lambda key: models.index(key[1]))
    return [
        *(_curve(group, "published", place) for place, group in enumerate(claims.values())),
        *(_curve([*others[key].values()], "reference", place) for place, key in enumerate(keys)),
    ]


def _curve(group: Sequence[CardRate], kind: CurveKind, place: int) -> Curve:
    """Return published speeds as shares of the dense peak, with the numbers as they stand."""
    gpu, peak = group[0].gpu, f"{number(group[0].gpu.peak_bf16_tflops)} TFLOP/s dense bf16 per card"
    spots = [exact(one.cards * gpu.devices_per_card, one.share) for one in group]
    label = f"{gpu.name}, {group[0].model}"
    if kind == "published":
        values = ", ".join(f"{number(one.flops)} TFLOP/s per card" for one in group)
        return curve(f"published: {label}", kind, place, spots, f"{values}; {peak}")
    shares, tables = (
        [one.share for one in group],
        list(dict.fromkeys(f"{one.document}, {one.where}" for one in group)),
    )
    ends = " to ".join(dict.fromkeys(map(percent, (min(shares), max(shares)))))
    further = f", and {plural(len(tables) - 1, 'more row')}" if len(tables) > 1 else ""
    return curve(
        f"published elsewhere: {label}", kind, place, spots, f"{ends} of {peak}; {tables[0]}{further}"
    )
