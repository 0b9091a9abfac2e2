"""What two training points are compared by: their settings, their curves, and what decides those."""

from __future__ import annotations

from twinrun.workloads.curve_distance import ORDER
from twinrun.workloads.settings import factor, flat
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint
from twinrun.workloads.training.numbers import CONTROL
from twinrun.workloads.workload import ComparisonTerms, ControlledCurve, MeasuredPoint

# Largest difference of two kinds of hardware at the first step: 1, 2 and 4 H200s are by up to 3e-4 in bf16.
ROUNDING = {"fp32": 1e-6, "bf16": 1e-3}
# How a step is computed, not what: rounding aside, these leave the loss as it is.
ROUNDING_ONLY = {
    *("microbatch", "sharding", "attention", "activation_checkpointing", "compile", "warmup_steps"),
    *("reduction", "kernels", "layout", "controls"),
}

FACTORS = (
    factor("model", "large", "large", "arithmetic for each token, and the size of its matrices"),
    factor("shape.*", "some", "large", "part of the model"),
    factor("training.precision", "large", "some", "16 bits are several times faster and round more"),
    factor("training.fp8_recipe", "large", "some", "scales of tensors or of rows, and what stays in bf16"),
    factor("training.global_batch", "some", "large", "work between optimizer steps; another optimisation"),
    factor("training.activation_checkpointing", "large", "none", "a third more arithmetic"),
    factor("training.attention", "large", "small", "another kernel; `math` keeps the whole matrix"),
    factor("training.kernels", "large", "small", "another scan and convolution"),
    factor("training.layout", "some", "small", "another order in memory around the scan"),
    factor("training.parameter_type", "some", "large", "updates below 16 bits are lost"),
    factor("training.position_weighting", "none", "large", "another loss"),
    factor("training.trainer", "large", "small", "another training loop around the same model"),
    factor("training.controls", "none", "none", "the run itself stays as it is"),
    factor("training.compile", "large", "small", "compiled blocks fuse kernels"),
    factor("training.sharding", "some", "small", "gathers of parameters in every step"),
    factor("training.seed", "none", "large", "another initialisation and another order of the data"),
    factor("training.optimizer.*", "none", "large", "another optimisation"),
    factor("training.data", "none", "large", "other text"),
    factor("training.microbatch", "some", "small", "size of one forward pass"),
    factor("training.*", "small", "small", "length of the run and of its warm-up"),
    factor("microbatch", "some", "small", "size of one forward pass"),
    factor("attention backend", "some", "small", "another kernel for attention"),
    factor("layout.*", "large", "small", "another way to share the work"),
    factor("parallelism", "some", "small", "another exchange of gradients and parameters"),
    factor("data hash", "none", "large", "other tokens"),
    factor("order hash", "none", "large", "other samples in a step"),
    factor("data.*", "none", "large", "another source of tokens"),
)


def terms(part: TrainingPlan, point: MeasuredPoint[TrainingPoint]) -> ComparisonTerms:
    """Return what a training point is compared by."""
    losses = loss_of(part, point)
    return ComparisonTerms(settings=_settings(part, point), curves={"loss": losses} if losses else {})


def _settings(part: TrainingPlan, point: MeasuredPoint[TrainingPoint]) -> dict[str, str]:
    """Return by name what may change the numbers of a point."""
    layout, result = point.part.layout, point.result
    return {
        "model": part.training.model,
        "microbatch": str(result.microbatch),
        "attention backend": result.attention_backend,
        "parallelism": result.parallelism,
        "data hash": result.data_hash,
        ORDER: result.order_hash,
        **{f"shape.{name}": value for name, value in flat(part.shape).items()},
        **{f"training.{name}": value for name, value in flat(part.training).items() if name != "model"},
        **{f"data.{name}": value for name, value in flat(part.data).items()},
        **{f"layout.{name}": value for name, value in (flat(layout) if layout else {}).items()},
    }


def loss_of(part: TrainingPlan, point: MeasuredPoint[TrainingPoint]) -> ControlledCurve | None:
    """Return the losses of a point with all that decides them; None where it has none that can be judged."""
    found = point.one_series("loss")
    precision = part.training.precision
    if found is None or not found.values or precision == "fp8" or precision not in ROUNDING:
        return None
    return ControlledCurve(
        name=point.id,
        values=found.values,
        controls=tuple(one.values for one in point.series if one.id.startswith(CONTROL)),
        configuration=mathematics(part),
        origins=dict(point.digests),
        arithmetic=precision,
        rounding=ROUNDING[precision],
    )


def mathematics(part: TrainingPlan) -> dict[str, str]:
    """Return the settings that decide the loss, rounding aside."""
    training = {name: value for name, value in flat(part.training).items() if name not in ROUNDING_ONLY}
    return training | {f"shape.{name}": value for name, value in flat(part.shape).items()}
