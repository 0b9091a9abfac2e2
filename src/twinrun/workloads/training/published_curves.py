"""What was published of a training recipe, on the axes of what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from twinrun.foundation.text import number, percent
from twinrun.manifests.claims import Claim, Reference
from twinrun.manifests.vendor import Gpu
from twinrun.workloads.charts import Curve, Spot
from twinrun.workloads.training.manifest import tables_of
from twinrun.workloads.workload import Drawn


def published_curves(drawn: Drawn, formula: str, models: Sequence[str], *, share: bool) -> list[Curve]:
    """Return the claims and the references in a formula.

    Args:
        models: whose references are drawn.
        share: of the dense peak, instead of TFLOP/s of a card.
    """
    claims = absolute_claims(drawn, formula)
    chosen = [one for model in models for one in references(drawn, formula) if one.model == model]
    model = tables_of(drawn.recipe).training.model
    return [
        *(_claimed(drawn.gpus[gpu], group, place, model, share) for place, (gpu, group) in enumerate(claims)),
        *(_reference(one, drawn.gpus[one.gpu], place, share) for place, one in enumerate(chosen)),
    ]


def references(drawn: Drawn, formula: str) -> list[Reference]:
    """Return the references in a formula and in the precision of the published configuration."""
    precision = tables_of(drawn.recipe).training.precision
    published = drawn.recipe.published.reference
    return [one for one in published if (one.formula, one.precision) == (formula, precision)]


def absolute_claims(drawn: Drawn, formula: str) -> list[tuple[str, list[Claim]]]:
    """Return by GPU model the absolute claims in a formula."""
    claims: dict[str, list[Claim]] = {}
    for claim in drawn.recipe.published.claim:
        if claim.kind == "absolute" and claim.formula == formula and claim.hardware:
            claims.setdefault(claim.hardware.gpu, []).append(claim)
    return list(claims.items())


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


def _reference(reference: Reference, gpu: Gpu, place: int, share: bool) -> Curve:
    shown = percent(_value(reference, gpu, True))
    return Curve(
        label=f"published elsewhere: {reference.label}, {reference.model}",
        kind="reference",
        place=place,
        spots=(_exact(reference.cards * gpu.devices_per_card, _value(reference, gpu, share)),),
        detail=(
            f"{shown}: {number(reference.value)} {reference.unit} per {reference.per},"
            f" {number(gpu.peak_bf16_tflops)} TFLOP/s dense bf16 per card;"
            f" {reference.source.document}, {reference.source.where}"
        ),
    )


def _value(published: Claim | Reference, gpu: Gpu, share: bool) -> float:
    rate = of_a_card(published.value, published.per, gpu)
    return rate / gpu.peak_bf16_tflops if share else rate


def _exact(devices: int, value: float) -> Spot:
    return Spot(x=devices, value=value, low=value, high=value)
