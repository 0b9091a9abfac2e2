"""What DeepSpeed refuses of a job, and its configuration as `ds_config.json` has it; needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.protocol.layout import Layout
from twinrun.protocol.training import TrainingJob

# Loss scaling as published: github:microsoft/Megatron-DeepSpeed@79b8e228be45:
# examples_deepspeed/rebase/ds_config_gbs256_mbs8_log1_zero1.json.
LOSS_SCALING = {
    "loss_scale": 0,
    "loss_scale_window": 500,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "initial_scale_power": 11,
}
# Settings that the training or the layout gives already; a second value could only contradict the first.
OWNED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "optimizer", "scheduler", "fp16", "bf16", "amp", "activation_checkpointing"),
    *("zero_optimization.stage", "zero_optimization.offload_optimizer.device"),
    *("zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.device"),
    "zero_optimization.offload_param.nvme_path",
)
# Numbers of one message. Buffers of the default, 5e8, would be 2 GB in fp32, whatever the model.
BUCKET, BUCKETS = 50_000_000, 16
NEVER = 1_000_000_000


Refusal = tuple[str, str, str]
"""A key of a layout, what it may be, and the reason."""


def refuse(job: TrainingJob) -> None:
    """Raise InputError for a layout that cannot train the job's model on its ranks."""
    layout, training = job.layout, job.training
    assert layout is not None
    for key, allowed, reason in (*_by_deepspeed(layout), *_not_offered(layout), *_of_job(job, layout)):
        found = getattr(layout, key) or getattr(training, key, None)
        raise InputError(reason, place=f"layouts.{job.point}.{key}", found=found, allowed=allowed)


def _by_deepspeed(layout: Layout) -> Iterator[Refusal]:
    """Yield what DeepSpeed 0.19.8 itself refuses."""
    if layout.sharding != "none":
        yield "sharding", "none", "DeepSpeed splits by its own stages, `zero`"
    if layout.replicas > 1 and layout.zero > 1:
        yield "zero", "0 or 1", "DeepSpeed's pipeline engine adds gradients up, which ZeRO-2 and 3 split"
    if layout.experts is not None and layout.zero == 3:
        yield "zero", "0, 1 or 2", "DeepSpeed does not split the parameters of experts"
    if layout.offload == "parameters" and layout.zero != 3:
        yield "offload", "none or optimizer", "only ZeRO-3 takes parameters from where they are"
    if layout.offload != "none" and not layout.zero:
        yield "offload", "none", "only what ZeRO splits is offloaded"
    if layout.storage is not None and (layout.offload == "none" or layout.zero != 3):
        yield "storage", "nothing", "only ZeRO-3 that offloads writes to a disk"


def _not_offered(layout: Layout) -> Iterator[Refusal]:
    """Yield what these engines do not put together."""
    if layout.experts is not None and (layout.replicas > 1 or layout.offload != "none"):
        yield "experts", "nothing", "experts are trained here with data parallelism and ZeRO-0 to 2 alone"
    if layout.replicas > 1 and layout.offload != "none":
        yield "offload", "none", "stages and cut matrices keep their optimizer on the device here"


def _of_job(job: TrainingJob, layout: Layout) -> Iterator[Refusal]:
    """Yield what model, arithmetic and batch stand against."""
    training, heads, layers = job.training, job.shape.key_heads(), getattr(job.shape, "layers", 1)
    experts = getattr(job.shape, "experts", None) or 0
    if bool(experts) != (layout.experts is not None) or (experts and experts % (layout.experts or 1)):
        divisors = f"a divisor of {experts}, the model's experts" if experts else "nothing for this model"
        yield "experts", divisors, "experts are whole, and DeepSpeed spreads them over ranks"
    if heads % layout.tensor:
        yield "tensor", f"a divisor of {heads}, the model's heads of keys", "heads are whole"
    if layout.pipeline > layers:
        yield "pipeline", f"1 to {layers}, the model's layers", "a stage has a layer"
    if training.compile and layout.tensor > 1:
        yield "tensor", "1 with compile", "the collectives between the parts of a matrix cannot be traced"
    if training.precision == "fp16" and not job.accelerator:
        yield "precision", "fp32, bf16", "DeepSpeed has no fp16 on a processor"
    if training.precision == "fp16" and not layout.zero:
        yield "zero", "1, 2, 3", "DeepSpeed's 16-bit optimizer without ZeRO takes a hidden step of its own"


def configuration(job: TrainingJob) -> dict[str, Any]:
    """Return the configuration of a job that has a layout.

    Raises:
        InputError: a setting inside a value, or one that the recipe says itself.
    """
    assert job.layout is not None
    training, layout = job.training, job.layout
    # DeepSpeed's 16-bit optimizer without ZeRO takes a step of Adam of its own before the first.
    sections = layout.zero > 0
    config: dict[str, Any] = {
        "train_batch_size": training.global_batch,
        "train_micro_batch_size_per_gpu": job.microbatch,
        "gradient_accumulation_steps": job.microbatches,
        "gradient_clipping": training.optimizer.gradient_clip,
        "zero_optimization": _zero(layout, job.shape.parameters()),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": sections and training.precision == "bf16"},
        "fp16": {"enabled": training.precision == "fp16", **LOSS_SCALING},
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
    }
    for name, value in layout.settings.items():
        _set(config, name, value)
    return config


def _zero(layout: Layout, parameters: int) -> dict[str, Any]:
    bucket = min(BUCKET, parameters // BUCKETS)
    where = {"device": "cpu"} if layout.storage is None else {"device": "nvme", "nvme_path": layout.storage}
    table = {"stage": layout.zero, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    offloaded = {"none": (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}[
        layout.offload
    ]
    return table | {f"offload_{name}": dict(where) for name in offloaded}


def _set(config: dict[str, Any], name: str, value: object) -> None:
    if any(f"{name}.".startswith(f"{one}.") or one.startswith(f"{name}.") for one in OWNED):
        hint = "change the layout, or --set the training's own setting"
        raise InputError("the recipe says this itself", place="settings", found=name, hint=hint)
    *tables, key = name.split(".")
    for table in tables:
        config = config.setdefault(table, {})
        if not isinstance(config, dict):
            raise InputError(
                "no table of DeepSpeed's configuration", place="settings", found=f"{name}: {table}"
            )
    config[key] = value
