"""What a user asks about: a model, how it is trained, and on how many of which devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.settings import overlay, parse_settings
from twinrun.manifests.vendor import Gpu
from twinrun.predict.calibration import Basis, Software
from twinrun.predict.configured_model import configured
from twinrun.predict.memory import largest_microbatch
from twinrun.predict.parallel_layout import GIGABIT, Machines, ParallelLayout, Precision
from twinrun.predict.prediction import Prediction, predict
from twinrun.predict.step import peak
from twinrun.protocol.models import member, members
from twinrun.protocol.models.shape import ActivationCheckpointing, ModelShape, Positive
from twinrun.protocol.training import Training

# Sequences of a step where a model is named and no recipe.
GLOBAL_BATCH = 512
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
    precision: Precision = "bf16"
    """Arithmetic of the products of blocks; the rest is bf16."""
    parameter_type: Literal["fp32", "bf16"] = "fp32"
    kept_whole: bool = False

    @classmethod
    def of(cls, training: Training) -> LayoutSettings:
        """Return those of a training; raises InputError for a precision that no row has."""
        if training.precision not in {"bf16", "fp8"}:
            why, found = "predictions rest on rows in bf16 and fp8", training.precision
            raise InputError(why, place="precision", found=found, allowed="bf16, fp8")
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
        named = self.model_dump(exclude={"model", "sequence", "global_batch", "microbatch", "parameter_type"})
        one = ParallelLayout(
            global_batch=self.global_batch,
            microbatch=1 if self.microbatch == "auto" else self.microbatch,
            parameter_bytes=BYTES[self.parameter_type],
            **named,
        )
        return software.applied(one)


def with_sequence(shape: ModelShape, sequence: int | None) -> ModelShape:
    """Return a model whose sequences have another length, itself where none is given."""
    return shape.model_copy(update={"sequence": sequence}) if sequence else shape


def machines_of(gpu: Gpu, nodes: int, devices_per_node: int, network: float | None) -> Machines:
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


def predict_at(shape: ModelShape, machines: Machines, settings: LayoutSettings, basis: Basis) -> Prediction:
    """Predict one number of nodes; `auto` takes the largest microbatch that fits, or 1.

    Raises:
        InputError: a precision that a GPU does not have, or something does not divide.
    """
    gpu = machines.gpu
    if not peak(gpu, settings.precision):
        allowed = [one for one in get_args(Precision) if peak(gpu, one)]
        message = f"its matrix units have no {settings.precision}"
        raise InputError(message, place="--set precision", found=gpu.name, allowed=allowed)
    work, layout = shape.work(), settings.layout(basis.software)
    layout.check(work, machines)
    if settings.microbatch == "auto":
        layout = layout.with_microbatch(largest_microbatch(work, machines, layout) or 1)
    return predict(shape, machines, layout, basis, checked=True)


@dataclass(frozen=True)
class Asked:
    """The model and its training, and in words what nobody said."""

    shape: ModelShape
    settings: LayoutSettings
    name: str
    silent: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()
    """Keys of a config.json that were not understood."""

    @property
    def said(self) -> list[str]:
        """The model in words, and what was left out of it."""
        size = f"{self.shape.parameters() / 1e9:.3g}B parameters"
        named = f"{self.name}: {size}, sequences of {self.shape.sequence:,} tokens."
        strange = f"Not understood, and left out: {', '.join(self.strange)}."
        return [named, *([strange] if self.strange else [])]


def subject_of_model(name: str, texts: Sequence[str]) -> Asked:
    """Return a member of a family, or what somebody's config.json says; raises InputError."""
    given, path = parse_settings(tuple(texts)), Path(name)
    if "model" in given:
        hint = f"twinrun predict {given['model']}"
        raise InputError("the model is the argument", place="--set model", found=given["model"], hint=hint)
    settings = LayoutSettings(model=name, global_batch=GLOBAL_BATCH).with_settings(given)
    silent = {"global_batch": f"{GLOBAL_BATCH} sequences a step", "shards": "all states split (FSDP)"}
    untold = tuple(text for key, text in silent.items() if key not in given)
    if path.suffix == ".json" or path.is_dir():
        config, strange = configured(path, sequence=settings.sequence)
        return Asked(config, settings, name, untold, strange)
    shape = with_sequence(member(name, place="twinrun predict"), settings.sequence)
    return Asked(shape, settings, name, untold)


def subject_of_recipe(recipe: LoadedRecipe, texts: Sequence[str]) -> Asked:
    """Return the model that a recipe trains; raises InputError where it trains none."""
    tables, name = recipe.tables, recipe.folder
    if not isinstance(tables, Trains):
        hint = f"name a model: {', '.join(sorted(members()))}"
        raise InputError("this recipe trains nothing", place=name, hint=hint)
    settings = LayoutSettings.of(tables.training).with_settings(parse_settings(tuple(texts)))
    require_known(settings.model, sorted(tables.models), "no such model", place="--set model")
    shape = with_sequence(tables.models[settings.model], settings.sequence)
    return Asked(shape, settings, f"{name}: {settings.model}")
