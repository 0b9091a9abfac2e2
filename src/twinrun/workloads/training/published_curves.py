"""What was published of a training recipe, on the axes of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from twinrun.foundation.text import number, percent, plural
from twinrun.manifests.claims import Claim
from twinrun.manifests.published import Reference
from twinrun.manifests.vendor import Gpu
from twinrun.workloads.charts import Curve, Spot
from twinrun.workloads.training.manifest import tables_of
from twinrun.workloads.workload import PictureContext

Number = TypeVar("Number", Claim, Reference)
TOKENS = ("tokens-per-second", "tokens/s")
TERA = 1e12
# More curves than these tell nothing apart.
MAX_REFERENCES = 8


def published_curves(
    drawn: PictureContext, formula: str, models: Sequence[str], *, share: bool
) -> list[Curve]:
    """Return the claims and the references in a formula.

    Args:
        models: whose references are drawn; of the published one alone where there are many.
        share: of the dense peak, instead of TFLOP/s of a card.
    """
    claims = absolute_claims(drawn, formula)
    model = tables_of(drawn.recipe).training.model
    others = _grouped(references(drawn, formula), models)
    if len(others) > MAX_REFERENCES:
        others = {key: group for key, group in others.items() if key[1] == model}
    return [
        *(_claimed(drawn.gpus[gpu], group, place, model, share) for place, (gpu, group) in enumerate(claims)),
        *(
            _reference(drawn.gpus[gpu], group, place, share)
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


def references(drawn: PictureContext, formula: str) -> list[Reference]:
    """Return the references in a formula and in the precision of the published configuration."""
    precision = tables_of(drawn.recipe).training.precision
    found = (_in_flops(one, one.model, one.cards, 1, drawn) for one in drawn.recipe.published.reference)
    return [one for one in found if (one.formula, one.precision) == (formula, precision)]


def absolute_claims(drawn: PictureContext, formula: str) -> list[tuple[str, list[Claim]]]:
    """Return by GPU model the absolute claims in a formula."""
    claims: dict[str, list[Claim]] = {}
    model = tables_of(drawn.recipe).training.model
    for one in drawn.recipe.published.claim:
        if one.kind == "absolute" and one.hardware:
            claim = _in_flops(one, model, one.hardware.cards, one.hardware.nodes, drawn)
            if claim.formula == formula:
                claims.setdefault(one.hardware.gpu, []).append(claim)
    return list(claims.items())


def _in_flops(published: Number, model: str, cards: int, nodes: int, drawn: PictureContext) -> Number:
    """Return a published number of tokens/s as model FLOP/s of a card, and any other as it is."""
    shape, gpu = tables_of(drawn.recipe).models.get(model), drawn.gpus.get(_gpu_of(published))
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


def _claimed(gpu: Gpu, claims: Sequence[Claim], place: int, model: str, share: bool) -> Curve:
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


def _reference(gpu: Gpu, group: Sequence[Reference], place: int, share: bool) -> Curve:
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
