"""What a user asks about: a model, how it is trained, on how many of which devices, and what was measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol, runtime_checkable

from twinrun.foundation.errors import InputError, require_known
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.settings import overlay, parse_settings
from twinrun.predict.calibration import Run, Subject
from twinrun.predict.configured_model import configured
from twinrun.predict.memory import largest_microbatch
from twinrun.predict.parallel_layout import Cuts, Machines, ParallelLayout, Shards, Software
from twinrun.predict.step import IDEAL
from twinrun.protocol.models import member, members
from twinrun.protocol.models.shape import ModelShape, Positive
from twinrun.protocol.training import Training

# Sequences of a step where a model is named and no recipe.
GLOBAL_BATCH = 512
BYTES = {"fp32": 4, "bf16": 2}
# What programs print of a step, and its seconds over the number; None where that is a rate of a device.
PRINTED = (
    (re.compile(r"elapsed time per iteration \(ms\): *([\d.,]+)"), 1e-3),
    (re.compile(r"\btps: *(?:\x1b\[\d+m)?([\d.,]+)"), None),
    (re.compile(r"throughput/device/tokens_per_sec: *([\d.,]+)"), None),
)
MOST_BYTES = 64 << 20
FORMS = "a record, a log of Megatron, torchtitan or Composer, or `tokens_per_second=13000 nodes=1 tensor=2`"


@runtime_checkable
class Trains(Protocol):
    """Tables of a recipe that trains one of its models."""

    training: Training
    models: Mapping[str, ModelShape]


class LayoutSettings(Cuts):
    """Fields that `--set` takes."""

    sequence: Positive | None = None
    """Tokens of a sequence; the model's where not given."""
    microbatch: Positive | Literal["auto"] = "auto"
    """`auto` is the largest that surely fits."""
    shards: Shards = "parameters"
    parameter_type: Literal["fp32", "bf16"] = "fp32"

    @classmethod
    def of(cls, training: Training) -> LayoutSettings:
        """Return those of a training; raises InputError for a precision that no row has."""
        if training.precision not in {"bf16", "fp8"}:
            why, found = "predictions rest on rows in bf16 and fp8", training.precision
            raise InputError(why, place="precision", found=found, allowed="bf16, fp8")
        return cls(
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

    def sized(self, shape: ModelShape) -> ModelShape:
        """Return a model with sequences of the length that was asked for."""
        return shape.model_copy(update={"sequence": self.sequence or shape.sequence})

    def layout(self, software: Software) -> ParallelLayout:
        """Return the layout, unchecked; `auto` is a microbatch of 1."""
        microbatch = 1 if self.microbatch == "auto" else self.microbatch
        one = ParallelLayout.of(self, microbatch=microbatch, parameter_bytes=BYTES[self.parameter_type])
        return software.applied(one)

    def subject(self, shape: ModelShape, machines: Machines, software: Software) -> Subject:
        """Return the training of a model; `auto` takes the largest microbatch that fits, or 1.

        Raises:
            InputError: something does not divide.
        """
        shape, layout = self.sized(shape), self.layout(software)
        if fault := layout.fault(shape.work(), machines):
            raise fault
        if self.microbatch == "auto":
            layout = layout.replace(microbatch=largest_microbatch(shape.work(), machines, layout) or 1)
        return Subject(shape, machines, layout, software)


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

    def on(self, machines: Machines, software: Software) -> Subject:
        """Return the training on machines; raises InputError for what does not divide."""
        return self.settings.subject(self.shape, machines, software)


def asked_of_model(name: str, texts: Sequence[str]) -> Asked:
    """Return a member of a family, or what somebody's config.json says; raises InputError."""
    given, path = parse_settings(tuple(texts)), Path(name)
    settings = LayoutSettings(global_batch=GLOBAL_BATCH).with_settings(given)
    silent = {"global_batch": f"{GLOBAL_BATCH} sequences a step", "shards": "all states split (FSDP)"}
    untold = tuple(text for key, text in silent.items() if key not in given)
    if path.suffix == ".json" or path.is_dir():
        config, strange = configured(path, sequence=settings.sequence)
        return Asked(config, settings, name, untold, strange)
    return Asked(settings.sized(member(name, place="twinrun predict")), settings, name, untold)


def asked_of_recipe(recipe: LoadedRecipe, texts: Sequence[str]) -> Asked:
    """Return the model that a recipe trains; raises InputError where it trains none."""
    tables, name = recipe.tables, recipe.folder
    if not isinstance(tables, Trains):
        hint = f"name a model: {', '.join(sorted(members()))}"
        raise InputError("this recipe trains nothing", place=name, hint=hint)
    given = parse_settings(tuple(texts))
    model = given.pop("model", tables.training.model)
    require_known(model, sorted(tables.models), "no such model", place="--set model")
    settings = LayoutSettings.of(tables.training).with_settings(given)
    return Asked(settings.sized(tables.models[model]), settings, f"{name}: {model}")


def run_of(text: str, asked: Asked, machines: Machines, software: Software) -> Run:
    """Return the run that a line says: `tokens_per_second` of a device, or `log`, and what was different.

    Args:
        machines: what it is asked for; a run is of one node of them where it does not say.

    Raises:
        InputError: no speed, a setting that is none, a layout that does not divide, or more than the peak.
    """
    is_log = "=" not in text and Path(text).is_file()
    given = {"log": text} if is_log else parse_settings(tuple(text.split()))
    rate, factor = given.pop("tokens_per_second", None), None
    if (log := given.pop("log", None)) is not None:
        rate, factor = _of_log(Path(str(log)))
    if not isinstance(rate, int | float) or rate <= 0:
        raise InputError("a run has a speed", place="--measured", found=text, allowed=FORMS)
    place: dict[str, Any] = {"nodes": 1, "devices_per_node": machines.devices_per_node}
    place["network"] = machines.network_gbit_s
    machines = Machines.of(machines.gpu, **{key: given.pop(key, here) for key, here in place.items()})
    subject = asked.settings.with_settings(given).subject(asked.shape, machines, software)
    tokens = subject.layout.global_batch * subject.shape.sequence / machines.devices
    seconds, least = factor * rate if factor else tokens / rate, subject.at(IDEAL).seconds
    if seconds < least:
        raise InputError(
            "more than the data sheet allows: another unit of devices, a sparse peak, or another model",
            place="--measured",
            found=f"{seconds:.4g} s a step",
            allowed=f"at least {least:.4g} s",
        )
    return Run(subject, seconds)


def _of_log(path: Path) -> tuple[float, float | None]:
    """Return the median of what the later half of a log prints, and a step's seconds over it."""
    try:
        text = path.read_bytes()[-MOST_BYTES:].decode("utf-8", errors="replace")
    except OSError as error:
        raise InputError("no such log", place="--measured", found=str(error), allowed=FORMS) from error
    for pattern, factor in PRINTED:
        if found := [float(one.replace(",", "").rstrip(".")) for one in pattern.findall(text)]:
            return median(found[len(found) // 2 :]), factor
    raise InputError("the log says no speed", place=f"--measured {path}", found=text[:60], allowed=FORMS)
