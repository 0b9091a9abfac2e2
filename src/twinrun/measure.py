"""From what the ranks report to the numbers of a record."""

from __future__ import annotations

import math

from twinrun.benchmark import COPY, BenchResult, Ceiling, Measured, Timing, Work, furthest
from twinrun.formulas import MODEL_FLOPS, model_flops_per_token
from twinrun.hardware import Gpu
from twinrun.job import Plan
from twinrun.record import (
    Attempt,
    CallRecord,
    CaseRecord,
    Floor,
    MeasurementRecord,
    ModelFlops,
    PointRecord,
    Utilisation,
    spread,
)
from twinrun.sizing import Case, Point
from twinrun.training import PointResult

TERA = 1e12


def measured_point(
    *, plan: Plan, point: Point, result: PointResult, attempts: tuple[Attempt, ...], gpu: Gpu | None
) -> PointRecord:
    """Turn the timed steps of one point into rates of one device.

    The tokens of a step are those of the global batch; a rate is that number over the step's wall
    time and over the devices, so a slower rank slows every device.
    """
    timed = [step.seconds for step in result.steps if step.timed]
    tokens = plan.training.global_batch * plan.shape.sequence / point.world_size
    rates = spread([tokens / seconds for seconds in timed], unit="tokens/s", per="device")
    flops = rates.scaled(model_flops_per_token(plan.shape) / TERA, unit="TFLOP/s", per="device")
    return PointRecord(
        id=point.id,
        nodes=point.nodes,
        devices=point.world_size,
        microbatch=result.microbatch,
        attempts=attempts,
        parameters=result.parameters,
        parallelism=result.parallelism,
        attention_backend=result.attention_backend,
        device_name=result.device_name,
        warmup_steps=len(result.steps) - len(timed),
        seconds_per_step=spread(timed, unit="s", per="run"),
        tokens_per_second=rates,
        model_flops=ModelFlops(rate=flops, formula=MODEL_FLOPS),
        utilisation=_utilisation(flops.median, gpu) if plan.training.precision == "bf16" else None,
        peak_memory_bytes=result.peak_memory_bytes,
        losses=tuple(step.loss for step in result.steps),
        data_hash=result.data_hash,
        order_hash=result.order_hash,
    )


def _utilisation(tflops: float, gpu: Gpu | None) -> Utilisation | None:
    if gpu is None:
        return None
    peak = gpu.device_peak_flops / TERA
    return Utilisation(value=tflops / peak, formula=MODEL_FLOPS, peak_tflops=peak, peak_source=gpu.source)


def measured_case(*, case: Case, result: BenchResult) -> CaseRecord:
    """Turn the times of one case into bandwidths and shares of what the device was measured to do."""
    return CaseRecord(
        id=case.id,
        settings=case.settings,
        seed=result.seed,
        ceilings=result.ceilings,
        measurements=tuple(_measurement(one, result.ceilings) for one in result.measurements),
        device_name=result.device_name,
        peak_memory_bytes=result.peak_memory_bytes,
    )


def _measurement(measured: Measured, ceilings: tuple[Ceiling, ...]) -> MeasurementRecord:
    ours, baseline = _call(measured.ours), _call(measured.baseline) if measured.baseline else None
    median = ours.milliseconds.median if ours.milliseconds else None
    theirs = baseline.milliseconds.median if baseline and baseline.milliseconds else None
    least, copy = floor(measured.work, ceilings), _rate(ceilings, COPY)
    bandwidth = measured.work.amounts.get(COPY, 0.0) / median * 1e3 if median else None
    return MeasurementRecord(
        id=measured.id,
        operation=measured.operation,
        element=measured.element,
        way=measured.way,
        amounts=measured.work.amounts,
        gigabytes_per_second=bandwidth / 1e9 if bandwidth else None,
        copy_share=bandwidth / copy if bandwidth and copy else None,
        floor=least,
        floor_share=least.milliseconds / median if least and median else None,
        allowed_error=measured.allowed_error,
        ours=ours,
        baseline=baseline,
        baseline_absent=measured.baseline_absent,
        ratio=theirs / median if theirs and median else None,
    )


def floor(work: Work, ceilings: tuple[Ceiling, ...]) -> Floor | None:
    """Return the least time of `work`: that of the ceiling which takes longest; None without ceilings."""
    times = {one.id: work.amounts[one.id] / one.rate * 1e3 for one in ceilings if one.id in work.amounts}
    if not times:
        return None
    slowest = max(times, key=lambda name: times[name])
    return Floor(milliseconds=times[slowest], ceiling=slowest, formula=work.formula)


def _call(timing: Timing) -> CallRecord:
    times = timing.milliseconds
    _, error = furthest(timing.errors)
    return CallRecord(
        implementation=timing.implementation,
        version=timing.version,
        milliseconds=spread(times, unit="ms", per="device") if times else None,
        error=error if math.isfinite(error) else None,
        errors=timing.errors,
        kept_bytes=timing.kept_bytes,
    )


def _rate(ceilings: tuple[Ceiling, ...], name: str) -> float | None:
    return next((one.rate for one in ceilings if one.id == name), None)
