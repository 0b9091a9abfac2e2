"""What a training recipe says beside what every recipe says, and the part of a plan that follows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated

from pydantic import Field, model_validator

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.recipe import LoadedRecipe, Scale, ScaledTables, Sweep
from twinrun.protocol.layout import Layout
from twinrun.protocol.models import AnyShape, ModelShape, member, members
from twinrun.protocol.models.shape import Positive
from twinrun.protocol.training import COMPOSER, PLAIN, DataSource, Sharding, Training
from twinrun.workloads.workload import LegSteps


class Leg(Frozen):
    """A stretch of one run: on which hardware, and for how many steps."""

    vendor: str | None = None
    """Folder of images/vendors; what the run has where not given. A processor is there on any machine."""
    devices: Positive = 1
    """Devices of one node, one rank each."""
    steps: Positive
    microbatch: Positive | None = None
    """Sequences of one forward pass; as the recipe says where not given."""


def leg_names(count: int) -> tuple[str, ...]:
    """Return the points that `count` legs are; the last one has the whole curve."""
    return (*(f"leg={number}" for number in range(1, count)), "leg=last") if count else ()


class TrainingScale(Scale):
    """One size of a sweep over devices."""

    sweep: Sweep
    legs: tuple[Leg, ...] = ()
    """A further run in stretches, each of which goes on from the checkpoint of the one before."""
    models: tuple[str, ...] = ()
    """Candidates, largest first, where the machine decides."""

    def gives(self, point: str) -> bool:
        """Say whether `point` can be one of this scale."""
        return self.sweep.gives(point) or point in leg_names(len(self.legs))


class LayoutEngine(Frozen):
    """A framework whose layouts the recipe's script trains, see `twinrun.train.training.main`."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """Import name of its package, or of a module beside the script; `trainer` and the layouts say it."""
    owns: tuple[str, ...] = ()
    """Settings of a layout that the training or the layout itself decides; a second value is refused."""
    allowed: dict[str, tuple[bool | int | float | str, ...]] = Field(default_factory=dict)
    """Every setting that its layouts have, and the values of each; where not given the engine knows them."""
    divisors: tuple[str, ...] = ()
    """Settings that divide the model's width and its sequence."""


class TrainingTables(ScaledTables[TrainingScale]):
    """Tables of recipe.toml."""

    members: tuple[str, ...] = ()
    """Models of families that are defined once, in src/twinrun/protocol/models/*.toml."""
    own_models: dict[str, AnyShape] = Field(default_factory=dict, alias="models")
    """Models of this recipe alone."""
    data: dict[str, DataSource]
    training: Training
    """The published configuration."""
    engine: LayoutEngine | None = None
    """Who trains layouts that are not PyTorch's own; without one every layout is."""
    named_layouts: dict[str, Layout] = Field(default_factory=dict, alias="layouts")
    """Ways to share the work that a sweep goes through; their names are its points."""

    @property
    def trainers(self) -> tuple[str, ...]:
        """Values of the setting `trainer`."""
        return (COMPOSER, PLAIN, *([self.engine.name] if self.engine else ()))

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Return every layout by name; one without `framework` has the engine's, or PyTorch's."""
        default = self.engine.name if self.engine else "torch"
        return {
            name: one
            if "framework" in one.model_fields_set
            else one.model_copy(update={"framework": default})
            for name, one in self.named_layouts.items()
        }

    @cached_property
    def models(self) -> dict[str, ModelShape]:
        """Return every model by name; raises InputError for a member that no family has."""
        return {**{name: member(name, place="members") for name in self.members}, **self.own_models}

    @model_validator(mode="after")
    def _steps_to_time(self) -> TrainingTables:
        if self.training.warmup_steps >= self.training.steps:
            raise ValueError("`warmup_steps` must be fewer than `steps`, or none is timed")
        return self


class TrainingPlan(Frozen):
    """What decides a sweep of one training configuration."""

    shape: AnyShape
    training: Training
    data: DataSource
    validation_data: DataSource | None = None
    """What the validation loss is taken on."""

    @property
    def variant(self) -> str:
        """What it does unlike a run through Composer that keeps all activations; begins with a comma."""
        training = self.training
        found = [] if training.trainer == COMPOSER else [f"{training.trainer} loop"]
        # The plain loop keeps all whatever was asked for.
        if training.trainer != PLAIN and training.activation_checkpointing:
            parts = {"selective": " in part", "selective-alternate": ", every second product too"}
            part = parts.get(str(training.activation_checkpointing), "")
            found.append(f"activations recomputed{part}")
        return "".join(f", {one}" for one in found)


class TrainingPoint(Frozen):
    """What one placement adds to the plan."""

    microbatches: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """Sequences of one forward pass of one device, largest first; the first that fits is kept."""
    sharding: Sharding | None = None
    """Points of one sweep run the same program; a device that is the whole sweep shards nothing.

    Null in records from before it was written down; the fact `parallelism` says what ran.
    """
    layout: Layout | None = None
    """Layout of the point; null where the sweep is over sizes."""
    shape: AnyShape | None = None
    """The model of a layout, which may be another than the sweep's."""
    controls: int = 0
    """Control runs after it."""
    leg: LegSteps | None = None
    """Null for a run that nothing interrupts."""


def check_names(recipe: LoadedRecipe[TrainingTables]) -> None:
    """Hold the names inside recipe.toml against each other; raises InputError."""
    tables, place = recipe.tables, recipe.manifest
    for name in tables.members:
        member(name, place=f"{place}:members")
    for name in tables.own_models.keys() & members().keys():
        raise InputError("defined already", place=f"{place}:models.{name}", hint=f'members = ["{name}"]')
    _demand(tables.training.model, tables.models, f"{place}:training.model")
    _demand(tables.training.trainer, dict.fromkeys(tables.trainers), f"{place}:training.trainer")
    for named, one in tables.layouts.items():
        allowed = dict.fromkeys(("torch", *tables.trainers[2:]))
        _demand(one.framework, allowed, f"{place}:layouts.{named}.framework")
    for metric, unit in tables.training.reports.items():
        at = f"{place}:training.reports.{metric}"
        _demand(metric, recipe.units, at)
        require_known(unit, [recipe.units[metric]], "another unit than that of the metric", place=at)
    if tables.engine and recipe.recipe.script is None:
        raise InputError(
            "an engine needs a script that starts it",
            place=f"{place}:script",
            found="none",
            hint="`training.main(engine=MODULE)` of twinrun.train is all that it holds",
        )
    _demand(tables.training.data, tables.data, f"{place}:training.data")
    if validation := tables.training.validation:
        _demand(validation.data, tables.data, f"{place}:training.validation.data")
    for name in ("smoke", "node", "paper"):
        for model in tables.scale(name).models:
            _demand(model, tables.models, f"{place}:scales.{name}.models")
        for layout in tables.scale(name).sweep.layouts or ():
            _demand(layout, tables.layouts, f"{place}:scales.{name}.sweep.layouts")


def _demand(
    name: str,
    allowed: Mapping[str, object],
    place: str,
) -> None:
    require_known(name, sorted(allowed), "no such name", place=place)
