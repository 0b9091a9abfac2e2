"""From what the ranks report to the numbers of a record."""

from __future__ import annotations

from twinrun.formulas import MODEL_FLOPS, model_flops_per_token
from twinrun.hardware import Gpu
from twinrun.job import Plan
from twinrun.record import Attempt, ModelFlops, PointRecord, Utilisation, spread
from twinrun.sizing import Point
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
