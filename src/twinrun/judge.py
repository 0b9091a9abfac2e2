"""Verdicts: each published claim against one record, and the reason in words."""

from __future__ import annotations

import math

from twinrun.claims import Claim, Published
from twinrun.fingerprint import Difference, nearest
from twinrun.hardware import Gpu
from twinrun.record import BenchRecord, PointRecord, Record, Verdict


def judge(record: Record | BenchRecord, published: Published, gpus: dict[str, Gpu]) -> tuple[Verdict, ...]:
    """Judge every claim against `record`, in the published order."""
    if isinstance(record, BenchRecord):
        return tuple(_time(claim, record, published, gpus) for claim in published.claim)
    rules = {"absolute": _absolute, "ratio": _ratio, "invariant": _invariant}
    return tuple(rules[claim.kind](claim, record, gpus) for claim in published.claim)


def measured_value(claim: Claim, point: PointRecord, gpu: Gpu | None) -> float:
    """Return what `point` measured of the claim's metric, in the claim's unit and per what it counts."""
    rate = point.model_flops.rate if claim.metric == "model-flops" else point.tokens_per_second
    return rate.median * (gpu.devices_per_card if gpu and claim.per == "card" else 1)


def _time(claim: Claim, record: BenchRecord, published: Published, gpus: dict[str, Gpu]) -> Verdict:
    """Judge the time of one measurement of one case; ours is what counts, whatever the baseline takes."""
    assert claim.hardware is not None
    assert claim.point is not None
    assert claim.measurement is not None
    published_gpu, case = gpus[claim.hardware.gpu], record.point(claim.point)
    found = case.measurement(claim.measurement) if case else None
    times = found.ours.milliseconds if found else None
    if record.gpu is None or record.gpu.id != published_gpu.id:
        here = f"; {times.median:.3g} ms here" if times else ""
        return _verdict(claim, "not-comparable", f"{_hardware_apart(record, published_gpu)}{here}")
    if case is None or times is None:
        lacking = f"no case {claim.point}" if case is None else f"no time of {claim.measurement}"
        return _verdict(claim, "not-comparable", f"this run has {lacking}; it has {_names(record)}")
    _, apart = nearest([case.settings], published.fingerprint)
    if apart:
        return _verdict(claim, "config-mismatch", _mismatch(apart), times.median)
    return _directed(claim, times.median)


def _absolute(claim: Claim, record: Record, gpus: dict[str, Gpu]) -> Verdict:
    assert claim.hardware is not None
    assert claim.point is not None
    published_gpu = gpus[claim.hardware.gpu]
    if record.gpu is None or record.gpu.id != published_gpu.id:
        return _verdict(claim, "not-comparable", _other_hardware(claim, record, published_gpu))
    point = record.point(claim.point)
    if point is None:
        return _verdict(
            claim, "not-comparable", f"this run has no point {claim.point}; it has {_names(record)}"
        )
    value = measured_value(claim, point, record.gpu)
    if record.plan.differences:
        return _verdict(claim, "config-mismatch", _mismatch(record.plan.differences), value)
    return _directed(claim, value)


def _ratio(claim: Claim, record: Record, _: dict[str, Gpu]) -> Verdict:
    assert claim.between is not None
    over, under = (record.point(name) for name in claim.between)
    if over is None or under is None:
        return _verdict(claim, "not-comparable", _other_scale(claim, record))
    value = measured_value(claim, over, record.gpu) / measured_value(claim, under, record.gpu)
    if record.plan.differences:
        return _verdict(claim, "config-mismatch", _mismatch(record.plan.differences), value)
    return _directed(claim, value)


def _invariant(claim: Claim, record: Record, _: dict[str, Gpu]) -> Verdict:
    if len(record.points) < 2:
        return _verdict(
            claim, "not-comparable", f"needs two world sizes; this run has {_names(record) or 'none'}"
        )
    if len({point.order_hash for point in record.points}) > 1:
        return _verdict(
            claim, "config-mismatch", "data order: the points did not train on the same global batches"
        )
    value, step = largest_difference([point.losses for point in record.points])
    if math.isnan(value):
        return _verdict(claim, "not-reproduced", f"the loss is not a finite number at step {step}")
    held = value <= claim.tolerance
    reason = (
        f"{_names(record)}: largest relative difference {value:.2g} at step {step} of"
        f" {len(record.points[0].losses)}, allowed {claim.tolerance:g}; same batches in the same order"
    )
    return _verdict(claim, "reproduced" if held else "not-reproduced", reason, value)


def largest_difference(curves: list[tuple[float, ...]]) -> tuple[float, int]:
    """Return the largest relative distance between loss curves and its step, counted from 1.

    The value is nan, at the first such step, where a loss is not finite or a curve ends early.
    """
    worst, worst_step = 0.0, 1
    for step in range(1, max(len(curve) for curve in curves) + 1):
        losses = [curve[step - 1] if step <= len(curve) else math.nan for curve in curves]
        if not all(math.isfinite(loss) for loss in losses):
            return math.nan, step
        distance = (max(losses) - min(losses)) / max(abs(min(losses)), 1e-12)
        if distance > worst:
            worst, worst_step = distance, step
    return worst, worst_step


def _directed(claim: Claim, value: float) -> Verdict:
    """Compare with the published value in its direction of goodness."""
    change = value / claim.value - 1
    worse = -change if claim.better == "higher" else change
    outcome = "reproduced" if worse <= claim.tolerance else "not-reproduced"
    reason = (
        f"{abs(change):.1%} {'above' if change >= 0 else 'below'} the published value;"
        f" {claim.better} is better, {claim.tolerance:.0%} worse is allowed because {claim.because}"
    )
    return _verdict(claim, outcome, reason, value)


def _verdict(claim: Claim, outcome: str, reason: str, measured: float | None = None) -> Verdict:
    return Verdict.model_validate(
        {
            "claim": claim.id,
            "statement": claim.statement,
            "outcome": outcome,
            "reason": reason,
            "published": claim.value,
            "measured": measured,
            "unit": claim.unit,
            "per": claim.per,
        }
    )


def _other_hardware(claim: Claim, record: Record, published_gpu: Gpu) -> str:
    reason = _hardware_apart(record, published_gpu)
    if claim.metric != "model-flops":
        return reason
    peak = published_gpu.peak_bf16_tflops / (1 if claim.per == "card" else published_gpu.devices_per_card)
    ours = [f"{point.utilisation.value:.1%} at {point.id}" for point in record.points if point.utilisation]
    return (
        f"{reason}; MFU {claim.value / peak:.1%} published, {', '.join(ours) or 'unknown'} here"
        f" ({claim.formula}, dense bf16 peaks)"
    )


def _other_scale(claim: Claim, record: Record) -> str:
    assert claim.between is not None
    reason = f"needs the points {' and '.join(claim.between)}; this run has {_names(record) or 'none'}"
    if len(record.points) < 2 or record.gpu is None:
        return reason
    first, last = record.points[0], record.points[-1]
    own = measured_value(claim, last, record.gpu) / measured_value(claim, first, record.gpu)
    return f"{reason}, and from {first.id} to {last.id} it keeps {own:.3f}"


def _hardware_apart(record: Record | BenchRecord, published_gpu: Gpu) -> str:
    found = record.gpu.name if record.gpu else f"{record.machine.vendor}, no GPU in images/gpus.toml"
    return f"published on {published_gpu.name}, this run is on {found}"


def _mismatch(differences: tuple[Difference, ...]) -> str:
    fields = (f"{item.field} is {item.found}, published {item.published}" for item in differences)
    return "not the published configuration: " + "; ".join(fields)


def _names(record: Record | BenchRecord) -> str:
    return ", ".join(point.id for point in record.points)
