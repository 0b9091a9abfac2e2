"""From what the ranks of a training point report to the numbers of its record."""

from __future__ import annotations

from twinrun.foundation.errors import RunError
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.measurements import Measurement, Numbers, Series, rate, sampled, scaled
from twinrun.protocol.training import TrainingResult
from twinrun.workloads.training.manifest import TrainingPlan
from twinrun.workloads.workload import PointRecord

TERA = 1e12
GIB = 1 << 30


def measured(part: TrainingPlan, result: TrainingResult) -> Numbers:
    """Return step time, memory and loss; raises RunError where the ranks trained another model."""
    expected = part.shape.parameters()
    if result.parameters != expected:
        raise RunError(
            "the ranks trained another model than was planned",
            place=result.point,
            found=f"{result.parameters:,} parameters",
            allowed=f"{expected:,} by the closed form of `{part.shape.family}`",
        )
    timed = [step.seconds for step in result.steps if step.timed]
    memory = result.peak_memory_bytes / GIB
    return Numbers(
        measurements=(
            sampled("step-time", timed, metric="step-time", unit="s", per="run"),
            sampled("peak-memory", [memory], metric="peak-memory", unit="GiB", per="device"),
        ),
        series=(
            Series(
                id="loss",
                metric="loss",
                unit="nats/token",
                per="run",
                values=tuple(step.loss for step in result.steps),
            ),
        ),
        facts={
            "microbatch": result.microbatch,
            "parameters": result.parameters,
            "parallelism": result.parallelism,
            "attention backend": result.attention_backend,
            "device name": result.device_name,
            "warm-up steps": len(result.steps) - len(timed),
            "data hash": result.data_hash,
            "order hash": result.order_hash,
        },
    )


def derived(part: TrainingPlan, point: PointRecord, gpu: Gpu | None) -> tuple[Measurement, ...]:
    """Return rates, MFU and last loss of a point.

    The tokens of a step are those of the global batch; a rate is that number over the step's wall
    time and over the devices, so a slower rank slows every device.
    """
    found: list[Measurement] = []
    if step_time := point.measurement("step-time"):
        tokens = part.training.global_batch * part.shape.sequence / point.devices
        name = "tokens-per-second"
        tokens_rate = rate(step_time, tokens, name=name, metric=name, unit="tokens/s", per="device")
        found += [tokens_rate, *flops_of(tokens_rate, part, gpu)]
    if (losses := point.one_series("loss")) and losses.values:
        found.append(sampled("loss", losses.values[-1:], metric="loss", unit="nats/token", per="run"))
    return tuple(found)


def flops_of(tokens_rate: Measurement, part: TrainingPlan, gpu: Gpu | None) -> list[Measurement]:
    """Return model FLOP/s and, where the dense peak is known for the precision, MFU."""
    formula = part.shape.formula
    flops = scaled(
        tokens_rate,
        part.shape.flops_per_token() / TERA,
        name="model-flops",
        metric="model-flops",
        unit="TFLOP/s",
        per="device",
        formula=formula,
    )
    if gpu is None or part.training.precision != "bf16":
        return [flops]
    share = scaled(
        flops,
        TERA / gpu.device_peak_flops,
        name="model-flops-share",
        metric="model-flops-share",
        unit="ratio",
        per="device",
        formula=formula,
    )
    return [flops, share]
