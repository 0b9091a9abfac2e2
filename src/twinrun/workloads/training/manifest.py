"""What a training recipe says beside what every recipe says, and the part of a plan that follows."""

from __future__ import annotations

from pydantic import model_validator

from twinrun.foundation.errors import InputError, closest
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.recipe import LoadedRecipe, Scale, Sweep
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import DataSource, Sharding, Training
from twinrun.workloads.workload import Part


class TrainingScale(Scale):
    """One size of a sweep over devices."""

    sweep: Sweep
    models: tuple[str, ...] = ()
    """Candidates, largest first, where the machine decides."""


class TrainingScales(Frozen):
    """The three sizes."""

    smoke: TrainingScale
    node: TrainingScale
    paper: TrainingScale


class Tables(Frozen):
    """Tables of recipe.toml."""

    baseline: str | None = None
    """File that trains the same job in a plain PyTorch loop, for `--set trainer=plain`."""
    models: dict[str, AnyShape]
    data: dict[str, DataSource]
    training: Training
    """The published configuration."""
    scales: TrainingScales

    def scale(self, name: str) -> TrainingScale:
        """Return the scale called `name`."""
        found: TrainingScale = getattr(self.scales, name)
        return found

    @model_validator(mode="after")
    def _steps_to_time(self) -> Tables:
        if self.training.warmup_steps >= self.training.steps:
            raise ValueError("`warmup_steps` must be fewer than `steps`, or none is timed")
        return self


class TrainingPlan(Part, extra="forbid"):
    """What decides a sweep of one training configuration."""

    shape: AnyShape
    training: Training
    data: DataSource


class TrainingPoint(Part, extra="forbid"):
    """What one placement adds."""

    microbatches: tuple[int, ...]
    """Sequences of one forward pass of one device, largest first; the first that fits is kept."""
    sharding: Sharding | None = None
    """Points of one sweep run the same program; a device that is the whole sweep shards nothing.

    Null in records from before it was written down; the fact `parallelism` says what ran.
    """


def tables_of(recipe: LoadedRecipe) -> Tables:
    """Return the tables of a training recipe."""
    assert isinstance(recipe.tables, Tables)
    return recipe.tables


def check_names(recipe: LoadedRecipe) -> None:
    """Hold the names inside recipe.toml against each other; raises InputError."""
    tables, place = tables_of(recipe), recipe.manifest
    _demand(tables.training.model, tables.models, f"{place}:training.model")
    _demand(tables.training.data, tables.data, f"{place}:training.data")
    for name in ("smoke", "node", "paper"):
        for model in tables.scale(name).models:
            _demand(model, tables.models, f"{place}:scales.{name}.models")


def _demand(
    name: str, allowed: dict[str, object] | dict[str, DataSource] | dict[str, AnyShape], place: str
) -> None:
    if name not in allowed:
        choices = sorted(allowed)
        raise InputError(
            "no such name", place=place, found=name, allowed=choices, hint=closest(name, choices)
        )
