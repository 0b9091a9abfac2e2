"""From a training recipe to the points of a sweep, and to the jobs of their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.text import duration
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.manifests.settings import overlay
from twinrun.protocol.allocation import Placement
from twinrun.protocol.layout import UNSAVED
from twinrun.protocol.models import AnyShape
from twinrun.protocol.storage import StorageNeed
from twinrun.protocol.training import COMPOSER, PLAIN, Training, TrainingJob, identity
from twinrun.workloads.settings import Fingerprint, flat, flat_fields
from twinrun.workloads.sweep import KEYS, over_nodes, placements, refuse_demands
from twinrun.workloads.training import layouts
from twinrun.workloads.training.estimates import (
    SWEEP_SECONDS,
    Budget,
    estimated_seconds,
    processor_bytes,
)
from twinrun.workloads.training.legs import leg_points, one_leg
from twinrun.workloads.training.manifest import (
    TrainingPlan,
    TrainingPoint,
    TrainingScale,
    TrainingTables,
    check_names,
)
from twinrun.workloads.training.numbers import VALIDATION
from twinrun.workloads.training.prediction import with_predictions
from twinrun.workloads.training.refusals import refuse_attention, refuse_foreign, refuse_fp8, refuse_precision
from twinrun.workloads.training_terms import fingerprint, refuse_composer
from twinrun.workloads.workload import (
    Choice,
    DataRequest,
    Demand,
    Hardware,
    PlanDescription,
    PlanRequest,
    Point,
    PointDescription,
    Run,
    WorkloadPlan,
)

# Modules of the project that ranks import for each trainer; a function of theirs chooses between them.
_MODULES = {
    COMPOSER: ("twinrun.train.composer_loop",),
    PLAIN: ("twinrun.train.data_parallel",),
}
METRICS = (
    *("step-time", "tokens-per-second", "model-flops", "model-flops-share"),
    *("power", "tokens-per-second-per-watt"),
    *("loss", "peak-memory", "sample-order", "envelope-share"),
    *("state-memory", "state-of-formula", "traffic", "traffic-of-formula"),
)


def check(recipe: LoadedRecipe[TrainingTables], demands: Sequence[Demand]) -> Mapping[str, DataRequest]:
    """Hold the names inside recipe.toml, and what claims ask, against each other; raises InputError."""
    check_names(recipe)
    tables = recipe.tables
    refuse_demands(demands, lambda one: _missing(tables, one))
    sequence = tables.models[tables.training.model].sequence
    return {
        name: DataRequest(name=name, source=source, sequence=sequence) for name, source in tables.data.items()
    }


def _missing(tables: TrainingTables, asked: Demand) -> str | None:
    """Return why no scale gives a number, or None."""
    if asked.point is not None and not any(tables.scale(name).gives(asked.point) for name in SCALES):
        return f"no scale has a point {asked.point}"
    given = (*METRICS, *([VALIDATION] if tables.training.validation else ()), *tables.training.reports)
    if asked.metric not in given:
        return f"a training point of this recipe measures {', '.join(given)}"
    if asked.metric == VALIDATION:
        return _undue(tables, asked.measurement or "")
    if asked.measurement in (None, asked.metric):
        return None
    return f"the measurement of {asked.metric} is called {asked.metric}"


def _undue(tables: TrainingTables, measurement: str) -> str | None:
    """Return why no scale has a validation loss of this name, or None."""
    step = measurement.removeprefix(f"{VALIDATION}@")
    runs = [overlay(tables.training, scale=tables.scale(one).set, manifest="", user={}) for one in SCALES]
    taken = [(one.validation, one.steps) for one in runs if one.validation]
    if step.isdecimal() and any(one.due(int(step), steps=steps) for one, steps in taken):
        return None
    named = (f"{VALIDATION}@{steps} is the last, one each {one.every} steps" for one, steps in taken)
    return f"a measurement of {VALIDATION} names its step: {'; '.join(named)}"


def plan(request: PlanRequest[TrainingTables]) -> WorkloadPlan[TrainingPlan, TrainingPoint]:
    """Turn a request into a plan of one training configuration at several placements.

    Raises:
        InputError: a setting that does not exist or does not fit.
        MachineError: the model does not fit into the devices.
    """
    recipe, tables = request.recipe, request.recipe.tables
    scale, overrides = tables.scale(request.scale), dict(request.overrides)
    wanted: tuple[str, ...] | None = None
    requested: Any = None
    places: list[Placement] = []
    left_out: tuple[Choice, ...] = ()
    if scale.sweep.layouts:
        wanted = layouts.names(tables, scale, overrides.pop("layouts", None))
        requested = overrides.pop("devices", None)
    else:
        places, left_out = placements(
            scale.sweep, overrides, hardware=request.hardware, node_devices=request.node_devices
        )
    training = _training(tables, scale, overrides, recipe.manifest)
    if not {*KEYS, "global_batch"} & set(request.overrides):
        places, indivisible = _dividing(places, training.global_batch)
        left_out += indivisible
    because = "asked for" if "model" in overrides else "the recipe's for this scale"
    if wanted is None:
        if scale.models and "model" not in overrides:
            training, because = _largest(tables, scale, training, places, request.hardware)
        refuse_precision(training)
    refuse_foreign(tables.models[training.model], training)
    refuse_fp8(request, training, layouts=wanted is not None)
    if wanted is None:
        refuse_composer(training, request.hardware)
    refuse_attention(recipe, tables.models[training.model], training, request.hardware)
    swept = _swept(request, training, places)
    if wanted is not None and request.leg is None:
        given = {"wanted": wanted, "requested": requested, "manifest": recipe.manifest}
        swept = layouts.points(tables, training, scale, request.hardware, **given)
    shape = tables.models[training.model]
    # A prediction counts the nodes that the point will have.
    placed = (over_nodes(point, request.node_devices) for point in swept)
    predicted = tuple(with_predictions(point, shape, training, request.hardware) for point in placed)
    return _planned(tables, training, predicted, because, left_out)


def _dividing(places: list[Placement], batch: int) -> tuple[list[Placement], tuple[Choice, ...]]:
    """Return the places over which the global batch divides, or all where it does over none; name the others.

    The sizes that a machine has need not be those that a recipe's batch was chosen for.
    """
    kept = [one for one in places if batch % one.world_size == 0]
    lost = ", ".join(one.id for one in places if one not in kept)
    if not kept or not lost:
        return places, ()
    return kept, (
        Choice(name="left out", value=lost, because=f"they do not divide the global batch, {batch}"),
    )


def _swept(
    request: PlanRequest[TrainingTables], training: Training, places: list[Placement]
) -> tuple[Point[TrainingPoint], ...]:
    """Return the points of a sweep over sizes and the legs after them, or the one leg that was asked for."""
    recipe, hardware = request.recipe, request.hardware
    scale, shape = recipe.tables.scale(request.scale), recipe.tables.models[training.model]
    place = f"{recipe.manifest}:scales.{request.scale}.legs"
    legs = leg_points(scale.legs, shape, training, hardware, place=place)
    if request.leg is not None:
        return one_leg(legs, request.leg, scale=request.scale)
    return (*_points(shape, training, places, hardware), *legs) if places else legs


def _planned(
    tables: TrainingTables,
    training: Training,
    points: tuple[Point[TrainingPoint], ...],
    because: str,
    left_out: tuple[Choice, ...],
) -> WorkloadPlan[TrainingPlan, TrainingPoint]:
    ids = ", ".join(point.id for point in points)
    shape, data = tables.models[training.model], tables.data[training.data]
    return WorkloadPlan(
        part=TrainingPlan(
            shape=shape,
            training=training,
            data=data,
            validation_data=tables.data[training.validation.data] if training.validation else None,
        ),
        points=points,
        choices=(
            Choice(name="model", value=training.model, because=because),
            Choice(name="points", value=ids, because=f"global batch {training.global_batch} at each"),
            *left_out,
        ),
    )


def _training(
    tables: TrainingTables, scale: TrainingScale, overrides: dict[str, Any], manifest: str
) -> Training:
    training = overlay(tables.training, scale=scale.set, manifest=manifest, user=overrides)
    _known("model", training.model, tables.models)
    _known("data", training.data, tables.data)
    if training.validation:
        _known("validation.data", training.validation.data, tables.data)
    _known("trainer", training.trainer, dict.fromkeys(tables.trainers))
    if training.warmup_steps >= training.steps:
        raise InputError(
            "no step would be timed",
            place="--set warmup_steps",
            found=f"{training.warmup_steps} of {training.steps} steps",
            allowed="fewer warm-up steps than steps",
        )
    return training


def _known(key: str, name: str, table: dict[str, Any]) -> None:
    require_known(name, table, "no such name", place=f"--set {key}")


def _largest(
    tables: TrainingTables,
    scale: TrainingScale,
    training: Training,
    places: list[Placement],
    hardware: Hardware,
) -> tuple[Training, str]:
    """Return the largest candidate that fits and whose sweep is short, and why it was taken.

    Where no time can be estimated, as for a GPU without a row, that is the smallest.
    """
    world, longer = places[-1].world_size, ""
    candidates = [training.model_copy(update={"model": name}) for name in scale.models]
    for candidate in candidates:
        shape = tables.models[candidate.model]
        if not _budget(shape, candidate, places, hardware).fits(world):
            continue
        seconds = [estimated_seconds(shape, candidate, hardware, world=one.world_size) for one in places]
        known = [one for one in seconds if one is not None]
        if len(known) < len(seconds):
            longer = f": on this GPU the time of {candidate.model} is not known"
            continue
        total = sum(known)
        if total <= SWEEP_SECONDS:
            return candidate, f"the largest that fits and ends in about {duration(total)}{longer}"
        longer = longer or f"; --set model={candidate.model} takes about {duration(total)}"
    return candidates[-1], f"the smallest of the recipe{longer}"


def _seconds(
    shape: AnyShape, training: Training, hardware: Hardware, *, world: int, first: bool
) -> float | None:
    """Estimate the wall time of a point, that of the first with its control runs."""
    runs = 1 + training.controls if first else 1
    repeated = training.model_copy(update={"steps": training.steps * runs})
    return estimated_seconds(shape, repeated, hardware, world=world)


def _budget(shape: AnyShape, training: Training, places: Sequence[Placement], hardware: Hardware) -> Budget:
    """Return the memory of a sweep over `places`; a device that is the whole sweep shards nothing."""
    if _alone(places):
        training = training.model_copy(update={"sharding": "none"})
    return Budget(shape=shape, training=training, device_memory_bytes=hardware.device_memory_bytes)


def _alone(places: Sequence[Placement]) -> bool:
    return [(one.id.partition("=")[0], one.world_size) for one in places] == [("devices", 1)]


def _points(
    shape: AnyShape, training: Training, places: list[Placement], hardware: Hardware
) -> tuple[Point[TrainingPoint], ...]:
    budget, alone = _budget(shape, training, places, hardware), _alone(places)
    for place in places:
        if training.global_batch % place.world_size:
            raise InputError(
                "the global batch does not divide over the devices",
                place="--set global_batch",
                found=training.global_batch,
                allowed=f"a multiple of {place.world_size}",
            )
    fitting = [place for place in places if budget.microbatches(place.world_size)]
    points = tuple(
        Point(
            id=place.id,
            nodes=place.nodes,
            devices_per_node=place.devices_per_node,
            part=TrainingPoint(
                microbatches=budget.microbatches(place.world_size),
                sharding="none" if alone else training.sharding,
                controls=0 if number else training.controls,
            ),
            seconds=_seconds(shape, training, hardware, world=place.world_size, first=not number),
        )
        for number, place in enumerate(fitting)
    )
    if not points:
        raise budget.too_small(places[-1].world_size)
    return points


def describe(part: TrainingPlan, points: Sequence[Point[TrainingPoint]]) -> PlanDescription:
    """Return what follows from a plan of a training."""
    shape, training = part.shape, part.training
    return PlanDescription(
        subject=f"{training.model}, {training.precision}, {training.trainer}",
        configuration=(("Training", flat(training)), ("Model", flat(shape)), ("Data", flat(part.data))),
        points={point.id: _described(part, point.part, world=point.world_size) for point in points},
        data=DataRequest(name=training.data, source=part.data, sequence=shape.sequence),
        documents=_validation_data(part),
        reports=tuple(training.reports),
        identity=identity(shape, training),
        kernels=training.kernels == "ours" or training.attention == "triton",
        modules=_MODULES.get(training.trainer, (*_MODULES[PLAIN], training.trainer)),
        fingerprint=fingerprint(shape, training, part.data),
    )


def as_written(
    tables: TrainingTables, part: TrainingPlan, point: Point[TrainingPoint], name: str
) -> tuple[TrainingPlan, Point[TrainingPoint]]:
    """Return a plan's part and a point as recipe.toml has them at the paper scale, of the plan's model."""
    training = overlay(tables.training, scale=tables.scales.paper.set, manifest="recipe.toml", user={})
    own = part.training.model if part.training.model in tables.models else training.model
    written = TrainingPlan(shape=tables.models[own], training=training, data=tables.data[training.data])
    layout = tables.layouts.get(point.id) or tables.layouts.get(name)
    if point.part.layout is None or layout is None:
        return written, point
    model = layouts.trained(training.model_copy(update={"model": own}), layout).model
    shape = tables.models.get(model, tables.models[own])
    placed = point.part.model_copy(update={"layout": layout, "shape": shape, "sharding": layout.sharding})
    return written, point.model_copy(update={"part": placed})


def settings(part: TrainingPlan, point: Point[TrainingPoint]) -> Fingerprint:
    """Return the fingerprint; of a layout, how its ranks share the work and the model that they share."""
    layout, shape = point.part.layout, point.part.shape
    own = (
        {**flat_fields(layout, "ranks."), **(flat_fields(shape, "ranks.model.") if shape else {})}
        if layout
        else {}
    )
    return {**fingerprint(part.shape, part.training, part.data), **own}


def _validation_data(part: TrainingPlan) -> DataRequest | None:
    validation = part.training.validation
    if validation is None or part.validation_data is None:
        return None
    return DataRequest(name=validation.data, source=part.validation_data, sequence=part.shape.sequence)


def _described(part: TrainingPlan, point: TrainingPoint, *, world: int) -> PointDescription:
    parameters = (point.shape or part.shape).parameters()
    disk = point.layout.storage if point.layout and point.shape else None
    return PointDescription(
        attempts=tuple(f"microbatch {size}" for size in point.microbatches),
        steps=point.leg.end if point.leg else part.training.steps,
        rising_steps=_rising_steps(part),
        vocabulary=(point.shape or part.shape).vocabulary,
        leg=point.leg,
        unsaved=", ".join(one for one in UNSAVED if point.layout and one in point.layout.features),
        processor_bytes=processor_bytes(
            point.shape or part.shape,
            layouts.trained(part.training, point.layout),
            point.layout,
            microbatch=point.microbatches[-1],
            world=world,
        ),
        storage=StorageNeed(folder=disk, parameters=parameters) if disk else None,
    )


def _rising_steps(part: TrainingPlan) -> int:
    optimizer, tokens = part.training.optimizer, part.training.global_batch * part.shape.sequence
    if optimizer.schedule is None:
        return optimizer.warmup_steps or 0
    return -(-optimizer.schedule.warmup // tokens)


def job(part: TrainingPlan, point: Point[TrainingPoint], attempt: int, run: Run) -> TrainingJob:
    """Return the job of one attempt at a point, with the microbatch that it tries."""
    placed, leg = point.part, point.part.leg
    ends = {"controls": placed.controls} | ({"steps": leg.end} if leg else {})
    shared = run.model_dump() | {"data": run.folders.get("data", "")}
    if leg and leg.processor and run.accelerator:
        # The sensors are those of the GPUs.
        shared |= {"accelerator": False, "power": None}
    return TrainingJob(
        **shared,
        validation_data=run.folders.get("documents", ""),
        point=point.id,
        world_size=point.world_size,
        shape=placed.shape or part.shape,
        training=layouts.trained(part.training, placed.layout).model_copy(update=ends),
        layout=placed.layout,
        microbatch=placed.microbatches[attempt],
        sharding=placed.sharding or part.training.sharding,
    )
