"""Speeds of trainings, published beside measured, each as the rate of one card: tables and curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twinrun.foundation.text import TERA, number, percent, plural
from twinrun.manifests.claims import Claim
from twinrun.manifests.published import Reference
from twinrun.manifests.restatements import Source
from twinrun.manifests.vendor import Gpu
from twinrun.workloads.tables_and_charts import Curve, Spot
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint, TrainingTables
from twinrun.workloads.workload import CardRate, MeasuredPoint, PictureContext, RecordView

TOKENS, FLOPS = ("tokens-per-second", "tokens/s"), ("model-flops", "TFLOP/s")
# More curves than these tell nothing apart.
MAX_REFERENCES = 8


def published_rates(drawn: PictureContext[TrainingTables]) -> Iterator[CardRate]:
    """Yield the absolute claims about the recipe's own configuration, then the references."""
    tables, published = drawn.recipe.tables, drawn.recipe.published
    for claim in published.claim:
        # A claim about another configuration has its number in a reference, under the name of its model.
        if claim.kind == "absolute" and (at := claim.hardware) and claim.configuration is None:
            model, precision = tables.training.model, tables.training.precision
            label = f"{at.software}, {at.cards:,} cards"
            found = _published(claim, at.gpu, model, (at.cards, at.nodes), drawn)
            yield from (one._replace(label=label, precision=precision) for one in found)
    for row in published.reference:
        found = _published(row, row.gpu, row.model, (row.cards, 1), drawn)
        yield from (one._replace(mark="reference", label=row.label, precision=row.precision) for one in found)


def _published(
    number_of: Claim | Reference,
    gpu_id: str,
    model: str,
    size: tuple[int, int],
    drawn: PictureContext[TrainingTables],
) -> Iterator[CardRate]:
    """Yield a published speed as that of a card; nothing where its GPU or, for tokens, its model is unknown.

    Args:
        size: cards and nodes.
    """
    shape, gpu, (cards, nodes) = drawn.recipe.tables.models.get(model), drawn.gpus.get(gpu_id), size
    kind = (number_of.metric, number_of.unit)
    if gpu is None or (shape is None and kind == TOKENS) or kind not in (TOKENS, FLOPS):
        return
    per_card = {"device": gpu.devices_per_card, "card": 1, "node": nodes / cards, "run": 1 / cards}
    value, formula = number_of.value * per_card[number_of.per], number_of.formula or ""
    if shape is not None and kind == TOKENS:
        formula = shape.formula
    counts = shape.flops_by_formula() if shape else {}
    count = counts.get(formula)
    yield CardRate(
        mark="published",
        gpu=gpu,
        model=model,
        precision="",
        cards=cards,
        tokens=value if kind == TOKENS else value * TERA / count if count else None,
        flops=value * counts[formula] / TERA if kind == TOKENS else value,
        formula=formula,
        label="",
        document=number_of.source.document,
        where=_where(number_of, number_of.source, kind),
    )


def _where(published: Claim | Reference, source: Source, kind: tuple[str, str]) -> str:
    """Return where a number stands, with the number itself where it was converted."""
    said = f": {number(published.value)} {published.unit} per {published.per}" if kind == TOKENS else ""
    return f"{source.where}{said}"


def measured_rates(
    record: RecordView[TrainingPlan, TrainingPoint], gpus: dict[str, Gpu]
) -> Iterator[tuple[MeasuredPoint[TrainingPoint], CardRate]]:
    """Yield each point of a record on GPUs whose model FLOP/s were measured, with its rate."""
    for point in record.points:
        found, tokens = point.measurement(FLOPS[0]), point.measurement(TOKENS[0])
        if record.gpu is None or found is None or tokens is None:
            continue
        power, dies = point.measurement("power"), record.gpu.devices_per_card
        yield (
            point,
            CardRate(
                mark="measured",
                # The row of today has what the record's copy of it may lack.
                gpu=gpus.get(record.gpu.id, record.gpu),
                model=record.part.training.model,
                precision=record.part.training.precision,
                cards=point.devices / dies,
                tokens=tokens.median * dies,
                flops=found.median * dies,
                formula=record.part.shape.formula,
                label=f"{record.made}, {record.label}",
                document=record.run,
                where=f"{record.evidence}, {point.id}{record.part.variant}: run {record.run}",
                power=power.median if power else None,
            ),
        )


def rates(
    records: Sequence[RecordView[TrainingPlan, TrainingPoint]], drawn: PictureContext[TrainingTables]
) -> tuple[CardRate, ...]:
    """Return all speeds that were published or measured; a point of a layout is no choice of hardware."""
    own = (found for record in records for found in measured_rates(record, drawn.gpus))
    return (*published_rates(drawn), *(rate for point, rate in own if point.part.layout is None))


def drawn_rates(drawn: PictureContext[TrainingTables], formula: str) -> list[CardRate]:
    """Return the published speeds in a formula and in the precision of the published configuration."""
    precision = drawn.recipe.tables.training.precision
    return [one for one in published_rates(drawn) if (one.formula, one.precision) == (formula, precision)]


def published_curves(
    drawn: PictureContext[TrainingTables], formula: str, models: Sequence[str], *, share: bool
) -> list[Curve]:
    """Return the claims and the references in a formula.

    Args:
        models: those whose references are drawn; the published one alone where there are many.
        share: of the dense peak, instead of TFLOP/s of a card.
    """
    own, found = drawn.recipe.tables.training.model, drawn_rates(drawn, formula)
    claims: dict[str, list[CardRate]] = {}
    for one in found:
        if one.mark == "published":
            claims.setdefault(one.gpu.id, []).append(one)
    others = _by_size([one for one in found if one.mark == "reference"], models)
    if len(others) > MAX_REFERENCES:
        others = {key: group for key, group in others.items() if key[1] == own}
    return [
        *(_claimed_curve(group, place, share) for place, group in enumerate(claims.values())),
        *(_reference_curve(group, place, share) for place, group in enumerate(others.values())),
    ]


def _by_size(
    references: Sequence[CardRate], models: Sequence[str]
) -> dict[tuple[str, str], tuple[CardRate, ...]]:
    """Return the references of each GPU and model, in the order of `models`: the fastest of each size."""
    found: dict[tuple[str, str], dict[float, CardRate]] = {}
    for model in models:
        for one in references:
            if one.model == model:
                sizes = found.setdefault((one.gpu.id, model), {})
                if one.cards not in sizes or one.flops > sizes[one.cards].flops:
                    sizes[one.cards] = one
    return {key: tuple(one for _, one in sorted(sizes.items())) for key, sizes in found.items()}


def _claimed_curve(claims: Sequence[CardRate], place: int, share: bool) -> Curve:
    gpu = claims[0].gpu
    values = ", ".join(f"{number(one.flops)} TFLOP/s per card" for one in claims)
    spots = [_spot(one, share) for one in claims]
    return Curve(
        label=f"published: {gpu.name}, {claims[0].model}",
        kind="published",
        place=place,
        spots=tuple(sorted(spots, key=lambda spot: spot.x)),
        detail=f"{values}; {number(gpu.peak_bf16_tflops)} TFLOP/s dense bf16 per card",
    )


def _reference_curve(group: Sequence[CardRate], place: int, share: bool) -> Curve:
    gpu, shares = group[0].gpu, [one.share for one in group]
    ends = " to ".join(dict.fromkeys(percent(one) for one in (min(shares), max(shares))))
    tables = dict.fromkeys(f"{one.document}, {one.where}" for one in group)
    further = f", and {plural(len(tables) - 1, 'more row')}" if len(tables) > 1 else ""
    peak = f"{number(gpu.peak_bf16_tflops)} TFLOP/s dense bf16 per card"
    return Curve(
        label=f"published elsewhere: {gpu.name}, {group[0].model}",
        kind="reference",
        place=place,
        spots=tuple(_spot(one, share) for one in group),
        detail=f"{ends} of {peak}; {next(iter(tables))}{further}",
    )


def _spot(rate: CardRate, share: bool) -> Spot:
    value = rate.share if share else rate.flops
    return Spot(x=rate.cards * rate.gpu.devices_per_card, value=value, low=value, high=value)
