"""From a training recipe to the points of a sweep, and to the jobs of their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinrun.foundation.text import duration
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.manifests.settings import overlay
from twinrun.protocol.allocation import Placement
from twinrun.protocol.layout import UNSAVED, StorageNeed
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import PLAIN, Training, TrainingJob, identity
from twinrun.workloads.settings import Fingerprint, flat, flat_fields
from twinrun.workloads.sweep import KEYS, chosen, over_nodes, placements, refuse_demands
from twinrun.workloads.training import points as sweeps
from twinrun.workloads.training.estimates import Budget, processor_bytes
from twinrun.workloads.training.manifest import (
    MODULES,
    TrainingPlan,
    TrainingPoint,
    TrainingTables,
    check_names,
    check_training,
)
from twinrun.workloads.training.numbers import VALIDATION
from twinrun.workloads.training.refusals import refuse
from twinrun.workloads.training.terms import fingerprint
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

METRICS = (
    *("step-time", "tokens-per-second", "model-flops", "model-flops-share"),
    *("power", "tokens-per-second-per-watt"),
    *("loss", "peak-memory", "sample-order", "envelope-share"),
)
# A sweep that nobody asked to be longer ends in about this time.
SWEEP_SECONDS = 360.0


def check(recipe: LoadedRecipe[TrainingTables], demands: Sequence[Demand]) -> Mapping[str, DataRequest]:
    """Hold the names inside recipe.toml, and what claims ask, against each other; raises InputError."""
    check_names(recipe)
    tables = recipe.tables
    given = (*METRICS, *([VALIDATION] if tables.training.validation else ()), *tables.training.reports)

    def missing(asked: Demand) -> str | None:
        if asked.metric not in given:
            return f"a training point of this recipe measures {', '.join(given)}"
        if asked.metric == VALIDATION:
            return _undue(tables, asked.measurement or "")
        if asked.measurement in (None, asked.metric):
            return None
        return f"the measurement of {asked.metric} is called {asked.metric}"

    refuse_demands(demands, lambda point: any(tables.scale(one).gives(point) for one in SCALES), missing)
    return tables.data_requests(tables.training.model)


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
    recipe, tables, hardware = request.recipe, request.recipe.tables, request.hardware
    scale, overrides = tables.scale(request.scale), dict(request.overrides)
    layouts, places = bool(scale.sweep.layouts), list[Placement]()
    left_out: tuple[Choice, ...] = ()
    wanted, requested = (overrides.pop(key, None) if layouts else None for key in ("layouts", "devices"))
    names = chosen(wanted, scale.sweep.layouts or (), tables.layouts, key="layouts")
    if not layouts:
        places, left_out = placements(scale.sweep, overrides, hardware, request.node_devices)
    training = overlay(tables.training, scale=scale.set, manifest=recipe.manifest, user=overrides)
    check_training(recipe, training, "--set ")
    if not {*KEYS, "global_batch"} & set(request.overrides):
        places, indivisible = _dividing(places, training.global_batch)
        left_out += indivisible
    because = "asked for" if "model" in overrides else "the recipe's for this scale"
    if scale.models and "model" not in overrides and not layouts:
        training, because = _largest(tables, scale.models, training, places, hardware)
    refuse(request, training, layouts=layouts)
    shape = tables.models[training.model]
    found = sweeps.leg_points(scale.legs, shape, training, request)
    if request.leg is not None:
        found = sweeps.one_leg(found, request.leg, scale=request.scale)
    elif layouts:
        found = sweeps.layout_points(request, training, names, requested)
    elif places:
        found = (*sweeps.sized_points(shape, training, places, hardware), *found)
    # A prediction counts the nodes that the point will have.
    placed = (over_nodes(point, request.node_devices) for point in found)
    predicted = tuple(_predicted(point, shape, training, hardware) for point in placed)
    ids, validation = ", ".join(point.id for point in predicted), training.validation
    return WorkloadPlan(
        part=TrainingPlan(
            shape=shape,
            training=training,
            data=tables.data[training.data],
            validation_data=tables.data[validation.data] if validation else None,
        ),
        points=predicted,
        choices=(
            Choice(name="model", value=training.model, because=because),
            Choice(name="points", value=ids, because=f"global batch {training.global_batch} at each"),
            *left_out,
        ),
    )


def _dividing(places: list[Placement], batch: int) -> tuple[list[Placement], tuple[Choice, ...]]:
    """Return the places over which the global batch divides, or all where it does over none; name the others.

    The sizes that a machine has need not be those that a recipe's batch was chosen for.
    """
    kept = [one for one in places if batch % one.world_size == 0]
    lost = ", ".join(one.id for one in places if one not in kept)
    if not kept or not lost:
        return places, ()
    because = f"they do not divide the global batch, {batch}"
    return kept, (Choice(name="left out", value=lost, because=because),)


def _largest(
    tables: TrainingTables,
    models: Sequence[str],
    training: Training,
    places: Sequence[Placement],
    hardware: Hardware,
) -> tuple[Training, str]:
    """Return the largest candidate that fits and whose sweep is short, and why it was taken.

    Where no time can be estimated, as for a GPU without a row, that is the smallest.
    """
    longer = ""
    candidates = [training.model_copy(update={"model": name}) for name in models]
    for candidate in candidates:
        budget = sweeps.budget_of(tables.models[candidate.model], candidate, places, hardware)
        if not budget.fits(places[-1].world_size):
            continue
        seconds = [budget.seconds(one.world_size) for one in places]
        total = sum(one or 0.0 for one in seconds)
        if None in seconds:
            longer = f": on this GPU the time of {candidate.model} is not known"
        elif total <= SWEEP_SECONDS:
            return candidate, f"the largest that fits and ends in about {duration(total)}{longer}"
        else:
            longer = longer or f"; --set model={candidate.model} takes about {duration(total)}"
    return candidates[-1], f"the smallest of the recipe{longer}"


def _predicted(
    point: Point[TrainingPoint], shape: AnyShape, training: Training, hardware: Hardware
) -> Point[TrainingPoint]:
    """Return a point with a prediction for each of its microbatches; a leg on a processor has none."""
    part = point.part
    if part.leg and part.leg.processor:
        return point
    own = sweeps.trained(training, part.layout).model_copy(update={"sharding": part.sharding})
    budget = Budget(shape=part.shape or shape, training=own, hardware=hardware, layout=part.layout)
    place = {"nodes": point.nodes, "devices_per_node": point.devices_per_node}
    return point.model_copy(update={"predicted": budget.predictions(part.microbatches, **place)})


def describe(part: TrainingPlan, points: Sequence[Point[TrainingPoint]]) -> PlanDescription:
    """Return what follows from a plan of a training."""
    shape, training, validation = part.shape, part.training, part.training.validation
    requests = [
        DataRequest(name=name, source=source, sequence=shape.sequence) if source else None
        for name, source in (
            (training.data, part.data),
            (validation.data if validation else "", part.validation_data),
        )
    ]
    return PlanDescription(
        subject=f"{training.model}, {training.precision}, {training.trainer}",
        configuration=(("Training", flat(training)), ("Model", flat(shape)), ("Data", flat(part.data))),
        points={point.id: _described(part, point) for point in points},
        data=requests[0],
        documents=requests[1],
        reports=tuple(training.reports),
        identity=identity(shape, training),
        kernels=training.kernels == "ours" or training.attention == "triton",
        modules=MODULES.get(training.trainer, (*MODULES[PLAIN], training.trainer)),
        fingerprint=fingerprint(shape, training, part.data),
    )


def _described(part: TrainingPlan, point: Point[TrainingPoint]) -> PointDescription:
    placed, optimizer = point.part, part.training.optimizer
    shape, layout, rising = placed.shape or part.shape, placed.layout, optimizer.warmup_steps or 0
    if optimizer.schedule:
        rising = -(-optimizer.schedule.warmup // (part.training.global_batch * part.shape.sequence))
    disk = layout.storage if layout else None
    training, world = sweeps.trained(part.training, layout), point.world_size
    needed = processor_bytes(shape, training, layout, microbatch=placed.microbatches[-1], world=world)
    return PointDescription(
        attempts=tuple(f"microbatch {size}" for size in placed.microbatches),
        steps=placed.leg.end if placed.leg else part.training.steps,
        rising_steps=rising,
        vocabulary=shape.vocabulary,
        leg=placed.leg,
        unsaved=", ".join(one for one in UNSAVED if layout and one in layout.features),
        processor_bytes=needed,
        storage=StorageNeed(folder=disk, parameters=shape.parameters()) if disk else None,
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
    model = sweeps.trained(training.model_copy(update={"model": own}), layout).model
    shape = tables.models.get(model, tables.models[own])
    placed = point.part.model_copy(update={"layout": layout, "shape": shape, "sharding": layout.sharding})
    return written, point.model_copy(update={"part": placed})


def settings(part: TrainingPlan, point: Point[TrainingPoint]) -> Fingerprint:
    """Return the fingerprint; of a layout, how its ranks share the work and the model that they share."""
    own = {"ranks.": point.part.layout, "ranks.model.": point.part.layout and point.part.shape}
    found = fingerprint(part.shape, part.training, part.data)
    for prefix, one in own.items():
        found |= flat_fields(one, prefix) if one else {}
    return found


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
        training=sweeps.trained(part.training, placed.layout).model_copy(update=ends),
        layout=placed.layout,
        microbatch=placed.microbatches[attempt],
        sharding=placed.sharding,
    )
