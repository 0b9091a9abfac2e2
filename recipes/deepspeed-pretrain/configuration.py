"""DeepSpeed's configuration of a job, as `ds_config.json` has it. Imports without torch."""

from __future__ import annotations

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
# Numbers of one message. Buffers of the default, 5e8, would be 2 GB in fp32, whatever the model.
BUCKET, BUCKETS = 50_000_000, 16
NEVER = 1_000_000_000


def configuration(job: TrainingJob) -> dict[str, Any]:
    """Return the configuration of a job that has a layout; raises InputError for a setting inside a value."""
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
    table: dict[str, Any] = {
        "stage": layout.zero,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if layout.storage is not None:
        where: dict[str, Any] = {"device": "nvme", "nvme_path": layout.storage}
    else:
        where = {"device": "cpu"}
    if layout.offload != "none":
        table["offload_optimizer"] = where
    if layout.offload == "parameters":
        table["offload_param"] = dict(where)
    return table


def _set(config: dict[str, Any], name: str, value: object) -> None:
    *tables, key = name.split(".")
    for table in tables:
        config = config.setdefault(table, {})
        if not isinstance(config, dict):
            raise InputError(
                "no table of DeepSpeed's configuration", place="settings", found=f"{name}: {table}"
            )
    config[key] = value
