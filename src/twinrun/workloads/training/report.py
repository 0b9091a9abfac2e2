"""What a training record shows: a table of its points, scaling curves, loss curves."""

from __future__ import annotations

from collections.abc import Sequence

from twinrun.foundation.text import number, percent, plain
from twinrun.manifests.claims import Claim, Published, Reference
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.measurements import Measurement
from twinrun.workloads.charts import Chart, Curve, LineChart, Spot
from twinrun.workloads.series import curves_of, distance_in_words, distances
from twinrun.workloads.tables import Column, Table, measured, text
from twinrun.workloads.training.manifest import TrainingPlan
from twinrun.workloads.workload import Drawn, PointRecord, Recorded

COLUMNS = (
    Column(title="point", numeric=False),
    Column(title="micro-\nbatch"),
    Column(title="tokens/s\nper device"),
    Column(title="model TFLOP/s\nper device"),
    Column(title="MFU"),
    Column(title="s/step"),
    Column(title="GiB per\ndevice"),
    Column(title="last loss\nnats/token"),
)


def part_of(record: Recorded) -> TrainingPlan:
    """Return what was trained."""
    assert isinstance(record.part, TrainingPlan)
    return record.part


def points_table(record: Recorded) -> Table:
    """Return a row for each point."""
    return Table(
        title="Points: median of the timed steps, and how far the farthest is from it",
        columns=COLUMNS,
        rows=tuple(
            (
                text(point.id, f"{point.facts['parallelism']}"),
                text(str(point.facts["microbatch"])),
                measured(point.measurement("tokens-per-second")),
                measured(point.measurement("model-flops")),
                measured(point.measurement("model-flops-share"), share=True),
                measured(point.measurement("step-time")),
                measured(point.measurement("peak-memory")),
                text(f"{loss.median:.4f}" if (loss := point.measurement("loss")) else "-"),
            )
            for point in record.points
        ),
        notes=_notes(record),
    )


def _notes(record: Recorded) -> tuple[str, ...]:
    formulas = {one.formula for point in record.points for one in point.measurements if one.formula}
    notes = [f"model FLOP/s: {formula}" for formula in sorted(formulas)]
    if record.gpu and any(point.measurement("model-flops-share") for point in record.points):
        peak = number(record.gpu.peak_bf16_tflops / record.gpu.devices_per_card)
        return (*notes, f"MFU: over {peak} TFLOP/s dense bf16 per device ({record.gpu.source})")
    return (*notes, "MFU: no dense peak is known for this device in this precision")


def charts(records: Sequence[Recorded], drawn: Drawn) -> tuple[Chart, ...]:
    """Return throughput and efficiency over devices and, of a single record, its loss curves."""
    found: list[Chart] = [
        one for one in (_throughput(records, drawn), _efficiency(records, drawn)) if one.curves
    ]
    if len(records) == 1:
        found += _losses(records[0], drawn.recipe.published)
    return tuple(found)


def _throughput(records: Sequence[Recorded], drawn: Drawn) -> LineChart:
    """Return MFU over devices, which a card of two devices and a device have in common; else tokens/s."""
    shares = [_curve(record, place, "model-flops-share") for place, record in enumerate(records)]
    known = [one for one in shares if one.spots]
    if not known:
        rates = [_curve(record, place, "tokens-per-second") for place, record in enumerate(records)]
        note = "MFU is not known here, so nothing published can be drawn beside it."
        return _chart(
            "throughput", "Throughput of one device", "tokens/s per device", "count", rates, (note,)
        )
    formula = part_of(records[0]).shape.formula
    left_out = ", ".join(one.label for one in shares if not one.spots)
    notes = (
        "MFU is model FLOP/s over the dense bf16 peak of the same device or card; zero-based axis.",
        *_other_model(records, drawn.recipe.published),
        *([f"Not drawn, for want of an MFU by this formula: {left_out}."] if left_out else []),
    )
    model = part_of(records[0]).training.model
    curves = [*known, *_published(drawn, formula), *_references(drawn, formula, model)]
    return _chart("throughput", "Throughput of one device", f"MFU ({formula})", "share", curves, notes)


def _efficiency(records: Sequence[Recorded], drawn: Drawn) -> LineChart:
    """Return throughput per device relative to the smallest point, without ranks that share a processor."""
    ours = [_curve(record, place, "tokens-per-second") for place, record in enumerate(records) if record.gpu]
    several = [one for one in ours if len(one.spots) > 1]
    formula = part_of(records[0]).shape.formula
    theirs = [one for one in _published(drawn, formula) if len(one.spots) > 1] if several else []
    note = "Each series is relative to its own smallest point; the axis does not start at zero."
    title, label = "What scaling keeps of it", "throughput per device, relative"
    return _chart(
        "efficiency", title, label, "relative", [_relative(one) for one in [*several, *theirs]], (note,)
    )


def _chart(  # noqa: PLR0917 - in the order of the picture
    name: str, title: str, label: str, scale: str, curves: Sequence[Curve], notes: tuple[str, ...]
) -> LineChart:
    return LineChart.model_validate(
        {
            "name": name,
            "title": title,
            "x_label": "devices",
            "x_scale": "log2",
            "y_label": label,
            "y_scale": scale,
            "curves": tuple(curves),
            "notes": notes,
        }
    )


def _curve(record: Recorded, place: int, metric: str) -> Curve:
    training = part_of(record).training
    loop = "" if training.trainer == "composer" else f", {training.trainer} loop"
    points = sorted(record.points, key=lambda point: point.devices)
    found = [(point, one) for point in points if (one := point.measurement(metric))]
    return Curve(
        label=f"{record.label}, {training.model}{loop}",
        kind="measured",
        place=place,
        spots=tuple(_spot(point, one) for point, one in found),
        detail=f"run {record.run}",
    )


def _spot(point: PointRecord, found: Measurement) -> Spot:
    return Spot(x=point.devices, value=found.median, low=found.low, high=found.high)


def _published(drawn: Drawn, formula: str) -> list[Curve]:
    """Return a curve for each GPU model that absolute claims in this formula name."""
    claims: dict[str, list[Claim]] = {}
    for claim in drawn.recipe.published.claim:
        if claim.kind == "absolute" and claim.formula == formula and claim.hardware:
            claims.setdefault(claim.hardware.gpu, []).append(claim)
    return [_claimed(drawn.gpus[gpu], group, place) for place, (gpu, group) in enumerate(claims.items())]


def _claimed(gpu: Gpu, claims: list[Claim], place: int) -> Curve:
    spots = [
        _exact(claim.hardware.cards * gpu.devices_per_card, claim.value / _peak(gpu, claim.per))
        for claim in claims
        if claim.hardware
    ]
    values = ", ".join(f"{number(claim.value)} {claim.unit} per {claim.per}" for claim in claims)
    return Curve(
        label=f"published: {gpu.name}",
        kind="published",
        place=place,
        spots=tuple(sorted(spots, key=lambda spot: spot.x)),
        detail=f"{values}; {number(gpu.peak_bf16_tflops)} TFLOP/s dense bf16 per card",
    )


def _references(drawn: Drawn, formula: str, model: str) -> list[Curve]:
    chosen = [one for one in drawn.recipe.published.reference if (one.formula, one.model) == (formula, model)]
    return [_reference(one, drawn.gpus[one.gpu], place) for place, one in enumerate(chosen)]


def _reference(reference: Reference, gpu: Gpu, place: int) -> Curve:
    share = reference.value / _peak(gpu, reference.per)
    return Curve(
        label=f"published elsewhere: {reference.label}",
        kind="reference",
        place=place,
        spots=(_exact(reference.cards * gpu.devices_per_card, share),),
        detail=(
            f"{percent(share)}: {number(reference.value)} {reference.unit} per {reference.per},"
            f" {number(gpu.peak_bf16_tflops)} TFLOP/s dense bf16 per card;"
            f" {reference.source.document}, {reference.source.where}"
        ),
    )


def _exact(devices: int, value: float) -> Spot:
    return Spot(x=devices, value=value, low=value, high=value)


def _peak(gpu: Gpu, per: str) -> float:
    """Return the dense peak in TFLOP/s of what a published number counts."""
    return gpu.peak_bf16_tflops / (1 if per == "card" else gpu.devices_per_card)


def _relative(curve: Curve) -> Curve:
    first = min(curve.spots, key=lambda spot: spot.x).value
    spots = tuple(
        Spot(x=one.x, value=one.value / first, low=one.low / first, high=one.high / first)
        for one in curve.spots
    )
    return curve.model_copy(update={"spots": spots})


def _other_model(records: Sequence[Recorded], published: Published) -> list[str]:
    theirs = published.fingerprint.get("parameters")
    ours = sorted({part_of(record).shape.parameters() for record in records})
    if not isinstance(theirs, int) or ours == [theirs]:
        return []
    return [
        f"The published model has {plain(theirs)} parameters; measured here: {', '.join(map(plain, ours))}."
    ]


def _losses(record: Recorded, published: Published) -> list[Chart]:
    points = [point for point in record.points if (curve := point.one_series("loss")) and curve.values]
    if not points:
        return []
    note = distance_in_words(points, "loss")
    found: list[Chart] = [
        curves_of(points, "loss", title="Loss at every point", label="loss, nats/token", note=note)
    ]
    allowed = [claim.tolerance for claim in published.claim if claim.is_distance and claim.metric == "loss"]
    if len(points) > 1 and allowed:
        apart = distances(points, "loss", limit=min(allowed), title="How far the losses are apart")
        found += [apart] if apart.curves[0].spots else []
    return found
