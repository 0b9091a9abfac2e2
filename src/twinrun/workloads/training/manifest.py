"""What a training recipe says beside what every recipe says, and the part of a plan that follows."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from pydantic import Field

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.recipe import AnyScale, Scale, ScaledTables, Sweep
from twinrun.protocol.layout import Layout
from twinrun.protocol.models import AnyShape, ModelShape, member, members
from twinrun.protocol.models.shape import Positive
from twinrun.protocol.training import COMPOSER, PLAIN, DataSource, Sharding, Training
from twinrun.workloads.workload import DataRequest, LegSteps

# Modules of the project that ranks import for each trainer; a function of theirs chooses between them.
MODULES = {COMPOSER: ("twinrun.train.composer_loop",), PLAIN: ("twinrun.train.data_parallel",)}


class Leg(Frozen):
    """A stretch of one run: on which hardware, and for how many steps."""

    vendor: str | None = None
    """Folder of images/vendors; what the run has where not given. A processor is there on any machine."""
    devices: Positive = 1
    """Devices of one node, one rank each."""
    steps: Positive
    microbatch: Positive | None = None
    """Sequences of one forward pass; as the recipe says where not given."""


class TrainingScale(Scale):
    """One size of a sweep over devices."""

    sweep: Sweep
    legs: tuple[Leg, ...] = ()
    """A further run in stretches, each of which goes on from the checkpoint of the one before."""
    models: tuple[str, ...] = ()
    """Candidates, largest first, where the machine decides."""

    @property
    def leg_names(self) -> tuple[str, ...]:
        """The points that the legs are; the last one has the whole curve."""
        return (*(f"leg={number}" for number in range(1, len(self.legs))), "leg=last") if self.legs else ()

    def gives(self, point: str) -> bool:
        """Say whether `point` can be one of this scale."""
        return self.sweep.gives(point) or point in self.leg_names


class LayoutEngine(Frozen):
    """A framework whose layouts the recipe's script trains, see `twinrun.train.training.main`."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """Import name of its package, or of a module beside the script; `trainer` and the layouts say it. It
    knows what the settings of its layouts may be."""


class ModelTables(ScaledTables[AnyScale]):
    """Tables of a recipe that trains: its models and its data."""

    members: tuple[str, ...] = ()
    """Models of families that are defined once, in src/twinrun/protocol/models/*.toml."""
    own_models: dict[str, AnyShape] = Field(default_factory=dict, alias="models")
    """Models of this recipe alone."""
    data: dict[str, DataSource]

    @cached_property
    def models(self) -> dict[str, ModelShape]:
        """Return every model by name; raises InputError for a member that no family has."""
        return {**{name: member(name, place="members") for name in self.members}, **self.own_models}

    def check_models(self, place: str) -> None:
        """Refuse members that no family has, and own models that one has; raises InputError."""
        for name in self.members:
            member(name, place=f"{place}:members")
        for name in self.own_models.keys() & members().keys():
            raise InputError("defined already", place=f"{place}:models.{name}", hint=f'members = ["{name}"]')

    def data_requests(self, model: str) -> dict[str, DataRequest]:
        """Return the data sets as a model reads them."""
        sequence = self.models[model].sequence
        return {
            name: DataRequest(name=name, source=one, sequence=sequence) for name, one in self.data.items()
        }


class TrainingTables(ModelTables[TrainingScale]):
    """Tables of recipe.toml."""

    training: Training
    """The published configuration."""
    engine: LayoutEngine | None = None
    """Who trains layouts that are not PyTorch's own; without one every layout is."""
    named_layouts: dict[str, Layout] = Field(default_factory=dict, alias="layouts")
    """Ways to share the work that a sweep goes through; their names are its points."""

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Return every layout by name; one without `framework` has the engine's, or PyTorch's."""
        own = {"framework": self.engine.name} if self.engine else {}
        return {
            name: one if "framework" in one.model_fields_set else one.model_copy(update=own)
            for name, one in self.named_layouts.items()
        }

    @property
    def engines(self) -> tuple[str, ...]:
        """The engine's name, where there is one."""
        return (self.engine.name,) if self.engine else ()


class TrainingPlan(Frozen):
    """What decides a sweep of one training configuration."""

    shape: AnyShape
    training: Training
    data: DataSource
    validation_data: DataSource | None = None
    """What the validation loss is taken on."""

    def at(self, point: TrainingPoint) -> TrainingPlan:
        """Return what is trained at a point: the model and settings of its layout, to the end of its leg."""
        training = trained(self.training, point.layout)
        if point.leg:
            training = training.model_copy(update={"steps": point.leg.end})
        return self.model_copy(update={"shape": point.shape or self.shape, "training": training})

    @property
    def variant(self) -> str:
        """What it does unlike a run through Composer that keeps all activations; begins with a comma."""
        training = self.training
        loop = "" if training.trainer == COMPOSER else f", {training.trainer} loop"
        # The plain loop keeps all whatever was asked for.
        again = training.trainer != PLAIN and training.activation_checkpointing
        return loop + (f", activations recomputed: {'all' if again is True else again}" if again else "")


class TrainingPoint(Frozen):
    """What one placement adds to the plan."""

    microbatches: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """Sequences of one forward pass of one device, largest first; the first that fits is kept."""
    sharding: Sharding
    """Points of one sweep run the same program; a device that is the whole sweep shards nothing."""
    layout: Layout | None = None
    """Layout of the point; null where the sweep is over sizes."""
    shape: AnyShape | None = None
    """The model of a layout, which may be another than the sweep's."""
    controls: int = 0
    """Control runs after it."""
    leg: LegSteps | None = None
    """Null for a run that nothing interrupts."""

    @property
    def begin(self) -> int:
        """Steps that were done when it begins."""
        return self.leg.begin if self.leg else 0


def trained(training: Training, layout: Layout | None) -> Training:
    """Return a training with the settings that a layout has of its own."""
    own = {name: getattr(layout, name, None) for name in ("precision", "microbatch")}
    own["model"] = f"{training.model}-{layout.variant}" if layout and layout.variant else None
    return training.model_copy(update={name: value for name, value in own.items() if value is not None})
