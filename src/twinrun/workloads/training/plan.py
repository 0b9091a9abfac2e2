"""From a training recipe to the points of a sweep, and to the jobs of their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.text import duration
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.manifests.settings import chosen, overlay
from twinrun.protocol.allocation import Placement
from twinrun.protocol.layout import UNSAVED, StorageNeed
from twinrun.protocol.training import Training, TrainingJob, identity
from twinrun.workloads.settings import Fingerprint, flat, flat_fields
from twinrun.workloads.sweep import KEYS, placements, refuse_demands
from twinrun.workloads.training import points as sweeps
from twinrun.workloads.training.manifest import MODULES, TrainingPlan, TrainingPoint, TrainingTables, trained
from twinrun.workloads.training.numbers import METRICS, VALIDATION, fingerprint
from twinrun.workloads.training.points import processor_bytes
from twinrun.workloads.training.refusals import demand_known, missing_from, of_training, raise_first
from twinrun.workloads.workload import (
    Choice,
    DataRequest,
    Demand,
    PlanDescription,
    PlanRequest,
    Point,
    PointDescription,
    Run,
    WorkloadPlan,
)

# A sweep that nobody asked to be longer ends in about this time.
SWEEP_SECONDS = 360.0


def check(recipe: LoadedRecipe[TrainingTables], demands: Sequence[Demand]) -> Mapping[str, DataRequest]:
    """Hold the names inside recipe.toml, and what claims ask, against each other; raises InputError."""
    tables, place, training = recipe.tables, recipe.manifest, recipe.tables.training
    tables.check_models(place)
    _check_training(recipe, training, f"{place}:training.")
    frameworks = ("torch", *tables.engines)
    for name, one in tables.layouts.items():
        demand_known(f"{place}:layouts.{name}.", ("framework", (one.framework,), frameworks))
    if tables.engine and recipe.recipe.script is None:
        hint = "`training.main(engine=MODULE)` of twinrun.train is all that it holds"
        message = "an engine needs a script that starts it"
        raise InputError(message, place=f"{place}:script", found="none", hint=hint)
    for name in SCALES:
        scale = tables.scale(name)
        demand_known(
            f"{place}:scales.{name}.",
            ("models", scale.models, tables.models),
            ("sweep.layouts", scale.sweep.layouts or (), tables.layouts),
        )
    given = {name: [name] for name in (*METRICS, *training.reports)}
    for scale in map(tables.scale, SCALES if training.validation else ()):
        run = overlay(training, scale=scale.set, manifest=recipe.manifest, user={})
        if taken := run.validation:
            due = (step for step in range(1, run.steps + 1) if taken.due(step, steps=run.steps))
            given.setdefault(VALIDATION, []).extend(f"{VALIDATION}@{step}" for step in due)
    missing = missing_from(given, "a training point of this recipe")
    refuse_demands(demands, lambda point: any(tables.scale(one).gives(point) for one in SCALES), missing)
    return tables.data_requests(training.model)


def _check_training(recipe: LoadedRecipe[TrainingTables], training: Training, place: str) -> None:
    """Refuse names of a training that the recipe does not have; raises InputError."""
    tables, validation = recipe.tables, training.validation
    demand_known(
        place,
        ("model", (training.model,), tables.models),
        ("data", (training.data,), tables.data),
        ("trainer", (training.trainer,), (*MODULES, *tables.engines)),
        ("validation.data", (validation.data,) if validation else (), tables.data),
        ("reports", training.reports, recipe.units),
    )
    for metric, unit in training.reports.items():
        at, message = f"{place}reports.{metric}", "another unit than that of the metric"
        require_known(unit, [recipe.units[metric]], message, place=at)


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
    if requested is not None and (type(requested) is not int or requested < 1):
        message = "expected a count of devices"
        raise InputError(message, place="--set devices", found=requested, allowed="1, 2, ...")
    if not layouts:
        places, left_out = placements(scale.sweep, overrides, hardware, request.node_devices)
    training = overlay(tables.training, scale=scale.set, manifest=recipe.manifest, user=overrides)
    _check_training(recipe, training, "--set ")
    if not {*KEYS, "global_batch"} & set(request.overrides):
        places, indivisible = _dividing(places, training.global_batch)
        left_out += indivisible
    because = "asked for" if "model" in overrides else "the recipe's for this scale"
    if scale.models and "model" not in overrides and not layouts:
        training, because = _largest(request, training, places)
    raise_first(of_training(request, training, layouts=layouts))
    found = sweeps.leg_points(request, training)
    if request.leg is not None and not 1 <= request.leg <= len(found):
        allowed = f"1 to {len(found)}" if found else f"none: the scale `{request.scale}` has no legs"
        raise InputError("no such leg", place="--leg", found=request.leg, allowed=allowed)
    if request.leg is not None:
        found = [found[request.leg - 1]]
    elif layouts:
        found = sweeps.layout_points(request, training, names, requested)
    elif places:
        found = [*sweeps.sized_points(request, training, places), *found]
    ids, validation = ", ".join(point.id for point in found), training.validation
    return WorkloadPlan(
        part=TrainingPlan(
            shape=tables.models[training.model],
            training=training,
            data=tables.data[training.data],
            validation_data=tables.data[validation.data] if validation else None,
        ),
        points=tuple(found),
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
    request: sweeps.Request, training: Training, places: Sequence[Placement]
) -> tuple[Training, str]:
    """Return the largest candidate that fits and whose sweep is short, and why it was taken.

    Where no time can be estimated, as for a GPU without a row, that is the smallest.
    """
    longer, models = "", request.recipe.tables.scale(request.scale).models
    candidates = [training.model_copy(update={"model": name}) for name in models]
    for candidate in candidates:
        budget = sweeps.budget_of(request, candidate, places)
        tried = [(one.world_size, budget.microbatches(one.world_size)) for one in reversed(places)]
        if not tried[0][1]:
            continue
        seconds = [budget.seconds(world, sizes[0]) if sizes else None for world, sizes in tried]
        total = sum(one or 0.0 for one in seconds)
        if None in seconds:
            longer = f": on this GPU the time of {candidate.model} is not known"
        elif total <= SWEEP_SECONDS:
            return candidate, f"the largest that fits and ends in about {duration(total)}{longer}"
        else:
            longer = longer or f"; --set model={candidate.model} takes about {duration(total)}"
    return candidates[-1], f"the smallest of the recipe{longer}"


def describe(part: TrainingPlan, points: Sequence[Point[TrainingPoint]]) -> PlanDescription:
    """Return what follows from a plan of a training."""
    shape, training, documents = part.shape, part.training, None
    if training.validation and part.validation_data:
        name, source = training.validation.data, part.validation_data
        documents = DataRequest(name=name, source=source, sequence=shape.sequence)
    return PlanDescription(
        subject=f"{training.model}, {training.precision}, {training.trainer}",
        configuration=(("Training", flat(training)), ("Model", flat(shape)), ("Data", flat(part.data))),
        points={point.id: _described(part, point) for point in points},
        data=DataRequest(name=training.data, source=part.data, sequence=shape.sequence),
        documents=documents,
        reports=tuple(training.reports),
        identity=identity(shape, training),
        kernels=training.kernels == "ours" or training.attention == "triton",
        fingerprint=fingerprint(part),
    )


def _described(part: TrainingPlan, point: Point[TrainingPoint]) -> PointDescription:
    placed, own, optimizer = point.part, part.at(point.part), part.training.optimizer
    layout, rising = placed.layout, optimizer.warmup_steps or 0
    if optimizer.schedule:
        rising = -(-optimizer.schedule.warmup // (part.training.global_batch * part.shape.sequence))
    disk = layout.storage if layout else None
    return PointDescription(
        attempts=tuple(f"microbatch {size}" for size in placed.microbatches),
        steps=own.training.steps,
        rising_steps=rising,
        vocabulary=own.shape.vocabulary,
        leg=placed.leg,
        unsaved=", ".join(one for one in UNSAVED if layout and one in layout.features),
        processor_bytes=processor_bytes(own, layout, placed.microbatches[-1], point.world_size),
        storage=StorageNeed(folder=disk, parameters=own.shape.parameters()) if disk else None,
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
    model = trained(training.model_copy(update={"model": own}), layout).model
    shape = tables.models.get(model, tables.models[own])
    placed = point.part.model_copy(update={"layout": layout, "shape": shape, "sharding": layout.sharding})
    return written, point.model_copy(update={"part": placed})


def settings(part: TrainingPlan, point: Point[TrainingPoint]) -> Fingerprint:
    """Return the fingerprint; of a layout, how its ranks share the work and the model that they share."""
    layout, shape = point.part.layout, point.part.shape
    ranks = flat_fields(layout, "ranks.") if layout else {}
    return fingerprint(part) | ranks | (flat_fields(shape, "ranks.model.") if layout and shape else {})


def job(part: TrainingPlan, point: Point[TrainingPoint], attempt: int, run: Run) -> TrainingJob:
    """Return the job of one attempt at a point, with the microbatch that it tries."""
    placed, own = point.part, part.at(point.part)
    shared = run.at(point) | {"data": run.folders.get("data", "")}
    if run.accelerator and placed.leg and placed.leg.processor:
        # The sensors are those of the GPUs.
        shared |= {"accelerator": False, "power": None}
    return TrainingJob(
        **shared,
        validation_data=run.folders.get("documents", ""),
        shape=own.shape,
        training=own.training.model_copy(update={"controls": placed.controls}),
        layout=placed.layout,
        microbatch=placed.microbatches[attempt],
        sharding=placed.sharding,
    )
