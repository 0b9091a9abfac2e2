"""What a user asks about: a model, how it is trained, and on how many of which devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.settings import overlay
from twinrun.manifests.vendor import Gpu
from twinrun.predict.calibration import Calibration, Software
from twinrun.predict.memory import largest_microbatch
from twinrun.predict.parallel_layout import GIGABIT, Machines, ParallelLayout
from twinrun.predict.prediction import Prediction, predict
from twinrun.protocol.models.shape import ActivationCheckpointing, ModelShape, Positive
from twinrun.protocol.training import Training

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@runtime_checkable
class Trains(Protocol):
    """Tables of a recipe that trains one of its models."""

    training: Training
    models: Mapping[str, ModelShape]


class LayoutSettings(Frozen):
    """Fields that `--set` takes."""

    model: str
    global_batch: Positive
    sequence: Positive | None = None
    """Tokens of a sequence; the model's where not given."""
    microbatch: Positive | Literal["auto"] = "auto"
    """`auto` is the largest that surely fits."""
    tensor: Positive = 1
    pipeline: Positive = 1
    interleaved: Positive = 1
    context: Positive = 1
    experts: Positive = 1
    sequence_parallel: bool = False
    zero_bubble: bool = False
    shards: Literal["none", "optimizer", "gradients", "parameters"] = "parameters"
    offload: Literal["none", "optimizer", "parameters"] = "none"
    recomputation: ActivationCheckpointing = False
    precision: Literal["bf16", "fp8"] = "bf16"
    """Arithmetic of the products of blocks; the rest is bf16."""
    parameter_type: Literal["fp32", "bf16"] = "fp32"
    kept_whole: bool = False

    @classmethod
    def of(cls, training: Training) -> LayoutSettings:
        """Return those of a training; raises InputError for a precision that no row has."""
        if training.precision not in {"bf16", "fp8"}:
            raise InputError(
                "predictions rest on rows in bf16 and fp8",
                place="precision",
                found=training.precision,
                allowed="bf16, fp8",
            )
        return cls(
            model=training.model,
            global_batch=training.global_batch,
            microbatch=training.microbatch,
            shards="parameters" if training.sharding == "full" else "none",
            recomputation=training.activation_checkpointing,
            precision="fp8" if training.precision == "fp8" else "bf16",
            parameter_type=training.parameter_type,
            kept_whole=training.sharding == "full" and training.reduction == "step",
        )

    def with_settings(self, settings: Mapping[str, Any]) -> LayoutSettings:
        """Return these with the fields that a user gave; raises InputError for what is none."""
        return overlay(self, scale={}, manifest="", user=dict(settings))

    def layout(self, software: Software) -> ParallelLayout:
        """Return the layout, unchecked; `auto` is a microbatch of 1."""
        named = self.model_dump(
            exclude={"model", "sequence", "global_batch", "microbatch", "parameter_type", "precision"}
        )
        one = ParallelLayout(
            global_batch=self.global_batch,
            microbatch=1 if self.microbatch == "auto" else self.microbatch,
            parameter_bytes=BYTES[self.parameter_type],
            fp8=self.precision == "fp8",
            **named,
        )
        return software.applied(one)


def with_sequence(shape: ModelShape, sequence: int | None) -> ModelShape:
    """Return a model whose sequences have another length, itself where none is given."""
    return shape.model_copy(update={"sequence": sequence}) if sequence else shape


def machines_of(gpu: Gpu, *, nodes: int, devices_per_node: int, network: float | None) -> Machines:
    """Return machines; `network` is in Gbit/s of a node.

    Raises:
        InputError: a count or a speed that is none.
    """
    for place, count in (("--nodes", nodes), ("--devices-per-node", devices_per_node)):
        if count < 1:
            raise InputError("expected a count", place=place, found=count, allowed="1, 2, ...")
    if network is not None and network <= 0:
        raise InputError("expected a speed in Gbit/s", place="--network", found=network, allowed="above 0")
    return Machines(gpu, devices_per_node, nodes, None if network is None else network * GIGABIT)


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
    """Predict one number of nodes; `auto` takes the largest microbatch that fits, or 1.

    Raises:
        InputError: a count or a speed that is none, or something does not divide.
    """
    machines = machines_of(gpu, nodes=nodes, devices_per_node=devices_per_node, network=network)
    if settings.precision == "fp8" and not gpu.fp8:
        raise InputError(
            "its matrix units have no fp8", place="--set precision", found=gpu.name, allowed="bf16"
        )
    work, layout = shape.work(), settings.layout(software)
    layout.check(work, machines)
    if settings.microbatch == "auto":
        layout = layout.with_microbatch(largest_microbatch(work, machines, layout) or 1)
    return predict(shape, machines, layout, software=software, calibration=calibration, checked=True)
