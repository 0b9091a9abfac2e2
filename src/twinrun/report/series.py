"""What the scaling pictures show: measured and published points in one unit, per device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from twinrun.claims import Claim, Published, Reference
from twinrun.hardware import Gpu
from twinrun.manifest import Frozen
from twinrun.record import PointRecord, Record
from twinrun.report.words import hardware, number, percent, plain, quantity

Kind = Literal["measured", "published", "reference"]


class Spot(Frozen):
    """One point of a curve over the number of devices."""

    devices: int
    value: float
    low: float
    high: float


class Series(Frozen):
    """Points that belong together."""

    label: str
    kind: Kind
    place: int
    """Among those of its kind; the same series has the same place in every chart."""
    spots: tuple[Spot, ...]
    detail: str = ""
    """The numbers as they stand in the source, and which source."""


class Chart(Frozen):
    """One picture as data."""

    quantity: str
    """Axis label, with unit and formula."""
    scale: Literal["share", "relative", "count"]
    """`share` is of one and drawn in percent; `relative` is to the first point of each series."""
    series: tuple[Series, ...]
    notes: tuple[str, ...]
    """What a reader must know to read it right."""


def throughput(records: Sequence[Record], published: Published, gpus: dict[str, Gpu]) -> Chart:
    """Return MFU over devices; where no MFU is known, tokens per second of a device.

    MFU is the one number that a card of two devices and a device have in common.
    """
    formula = _formula(records)
    if formula is None:
        return Chart(
            quantity="tokens/s per device",
            scale="count",
            series=tuple(_measured(records)),
            notes=("MFU is not known here, so nothing published can be drawn beside it.",),
        )
    measured = _measured(records, formula=formula)
    return Chart(
        quantity=f"MFU ({formula})",
        scale="share",
        series=(
            *(one for one in measured if one.spots),
            *_published(published, gpus, formula),
            *_references(published, gpus, formula, records[0].plan.training.model),
        ),
        notes=(
            "MFU is model FLOP/s over the dense bf16 peak of the same device or card; zero-based axis.",
            *_other_model(records, published),
            *(
                f"Not drawn, for want of an MFU by this formula: {one.label}."
                for one in measured
                if not one.spots
            ),
        ),
    )


def efficiency(records: Sequence[Record], published: Published, gpus: dict[str, Gpu]) -> Chart:
    """Return throughput per device relative to the smallest point of each series of two or more.

    Empty without a record to show; ranks that share a processor are no devices and are left out.
    """
    rates = zip(_measured(records), records, strict=True)
    measured = [one for one, record in rates if record.machine.devices and len(one.spots) > 1]
    formulas = sorted({claim.formula for claim in published.claim if claim.formula})
    theirs = [one for formula in formulas for one in _published(published, gpus, formula)]
    drawn = [*measured, *(one for one in theirs if len(one.spots) > 1)] if measured else []
    return Chart(
        quantity="throughput per device, relative",
        scale="relative",
        series=tuple(_relative(one) for one in drawn),
        notes=("Each series is relative to its own smallest point; the axis does not start at zero.",),
    )


def _formula(records: Sequence[Record]) -> str | None:
    known = (point.utilisation for record in records for point in record.points)
    return next((one.formula for one in known if one), None)


def _name(record: Record) -> str:
    training = record.plan.training
    loop = "" if training.trainer == "composer" else f", {training.trainer} loop"
    return f"{hardware(record)}, {training.model}{loop}"


def _measured(records: Sequence[Record], *, formula: str | None = None) -> list[Series]:
    """Return a series for each record: of tokens per second, or of MFU by `formula` where it is known."""
    return [
        Series(
            label=_name(record),
            kind="measured",
            place=place,
            spots=tuple(
                _spot(point, share=formula is not None)
                for point in sorted(record.points, key=lambda point: point.devices)
                if formula is None or (point.utilisation and point.utilisation.formula == formula)
            ),
            detail=f"run {record.run}",
        )
        for place, record in enumerate(records)
    ]


def _spot(point: PointRecord, *, share: bool) -> Spot:
    rate = point.tokens_per_second
    factor = point.utilisation.value / rate.median if share and point.utilisation else 1.0
    return Spot(
        devices=point.devices, value=rate.median * factor, low=rate.low * factor, high=rate.high * factor
    )


def _published(published: Published, gpus: dict[str, Gpu], formula: str) -> list[Series]:
    """Return a series for each GPU model that absolute claims in this formula name."""
    claims: dict[str, list[Claim]] = {}
    for claim in published.claim:
        if claim.kind == "absolute" and claim.formula == formula and claim.hardware:
            claims.setdefault(claim.hardware.gpu, []).append(claim)
    return [_claimed(gpus[gpu], group, place) for place, (gpu, group) in enumerate(claims.items())]


def _claimed(gpu: Gpu, claims: list[Claim], place: int) -> Series:
    spots = [
        _exact(claim.hardware.cards * gpu.devices_per_card, claim.value / _peak(gpu, claim.per))
        for claim in claims
        if claim.hardware
    ]
    values = ", ".join(quantity(claim.value, claim.unit, claim.per) for claim in claims)
    return Series(
        label=f"published: {gpu.name}",
        kind="published",
        place=place,
        spots=tuple(sorted(spots, key=lambda spot: spot.devices)),
        detail=f"{values}; {number(gpu.peak_bf16_tflops)} TFLOP/s dense bf16 per card",
    )


def _references(published: Published, gpus: dict[str, Gpu], formula: str, model: str) -> list[Series]:
    chosen = [one for one in published.reference if (one.formula, one.model) == (formula, model)]
    return [_reference(one, gpus, place) for place, one in enumerate(chosen)]


def _reference(reference: Reference, gpus: dict[str, Gpu], place: int) -> Series:
    gpu = gpus[reference.gpu]
    share = reference.value / _peak(gpu, reference.per)
    return Series(
        label=f"published elsewhere: {reference.label}",
        kind="reference",
        place=place,
        spots=(_exact(reference.cards * gpu.devices_per_card, share),),
        detail=(
            f"{percent(share)}: {quantity(reference.value, reference.unit, reference.per)},"
            f" {number(gpu.peak_bf16_tflops)} TFLOP/s dense bf16 per card;"
            f" {reference.source.document}, {reference.source.where}"
        ),
    )


def _exact(devices: int, value: float) -> Spot:
    return Spot(devices=devices, value=value, low=value, high=value)


def _peak(gpu: Gpu, per: str) -> float:
    """Return the dense peak in TFLOP/s of what a published number counts."""
    return gpu.peak_bf16_tflops / (1 if per == "card" else gpu.devices_per_card)


def _relative(series: Series) -> Series:
    first = min(series.spots, key=lambda spot: spot.devices).value
    spots = tuple(
        Spot(devices=one.devices, value=one.value / first, low=one.low / first, high=one.high / first)
        for one in series.spots
    )
    return series.model_copy(update={"spots": spots})


def _other_model(records: Sequence[Record], published: Published) -> list[str]:
    theirs = published.fingerprint.get("parameters")
    ours = sorted({int(point.parameters) for record in records for point in record.points})
    if not isinstance(theirs, int) or ours == [theirs]:
        return []
    counts = ", ".join(plain(count) for count in ours)
    return [f"The published model has {plain(theirs)} parameters; measured here: {counts}."]
