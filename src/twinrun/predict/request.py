"""What a user asks about: a model, how it is trained, and on how many of which devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.settings import overlay
from twinrun.manifests.vendor import Gpu
from twinrun.predict.calibration import Calibration, Software
from twinrun.predict.memory import largest_microbatch
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.predict.prediction import Prediction, predict
from twinrun.protocol.models.shape import ActivationCheckpointing, ModelShape, Positive
from twinrun.protocol.training import Training

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Bits of a gigabit a second, as bytes.
GIGABIT = 1e9 / 8


class LayoutSettings(Frozen):
    """Fields that `--set` takes."""

    model: str
    global_batch: Positive
    microbatch: Positive | Literal["auto"] = "auto"
    """`auto` is the largest that surely fits."""
    tensor: Positive = 1
    pipeline: Positive = 1
    interleaved: Positive = 1
    experts: Positive = 1
    shards: Literal["none", "optimizer", "gradients", "parameters"] = "parameters"
    offload: Literal["none", "optimizer", "parameters"] = "none"
    recomputation: ActivationCheckpointing = False
    parameter_type: Literal["fp32", "bf16"] = "fp32"
    kept_whole: bool = False

    @classmethod
    def of(cls, training: Training) -> LayoutSettings:
        """Return those of a training."""
        if training.precision != "bf16":
            raise InputError(
                "predictions rest on rows in bf16",
                place="precision",
                found=training.precision,
                allowed="bf16",
            )
        return cls(
            model=training.model,
            global_batch=training.global_batch,
            microbatch=training.microbatch,
            shards="parameters" if training.sharding == "full" else "none",
            recomputation=training.activation_checkpointing,
            parameter_type=training.parameter_type,
            kept_whole=training.sharding == "full" and training.reduction == "step",
        )

    def with_settings(self, settings: Mapping[str, Any]) -> LayoutSettings:
        """Return these with the fields that a user gave; raises InputError for what is none."""
        return overlay(self, scale={}, manifest="", user=dict(settings))

    def layout(self, shape: ModelShape, machines: Machines) -> ParallelLayout:
        """Return the layout on `machines`; `auto` takes the largest microbatch that fits, or 1."""
        one = ParallelLayout(
            global_batch=self.global_batch,
            microbatch=1 if self.microbatch == "auto" else self.microbatch,
            parameter_bytes=BYTES[self.parameter_type],
            **self.model_dump(exclude={"model", "global_batch", "microbatch", "parameter_type"}),
        )
        work = shape.work()
        one.check(work, machines)
        if self.microbatch != "auto":
            return one
        return one.with_microbatch(largest_microbatch(work, machines, one) or 1)


def predict_at(
    shape: ModelShape,
    gpu: Gpu,
    settings: LayoutSettings,
    *,
    nodes: int,
    devices_per_node: int,
    network: float | None,
    software: Software,
    calibration: Calibration,
) -> Prediction:
    """Predict one number of nodes; `network` is in Gbit/s of a node.

    Raises:
        InputError: a count or a speed that is none, or something does not divide.
    """
    for place, count in (("--nodes", nodes), ("--devices-per-node", devices_per_node)):
        if count < 1:
            raise InputError("expected a count", place=place, found=count, allowed="1, 2, ...")
    if network is not None and network <= 0:
        raise InputError("expected a speed in Gbit/s", place="--network", found=network, allowed="above 0")
    speed = None if network is None else network * GIGABIT
    machines = Machines(gpu, devices_per_node, nodes, speed)
    layout = settings.layout(shape, machines)
    return predict(shape, machines, layout, software=software, calibration=calibration, checked=True)
