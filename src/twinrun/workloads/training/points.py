"""From a request to the points of a sweep."""

from __future__ import annotations

from typing import Any

from twinrun.foundation.errors import InputError, closest
from twinrun.foundation.text import duration
from twinrun.manifests.settings import overlay
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import Training
from twinrun.workloads.fingerprint import Fingerprint
from twinrun.workloads.sweep import placement, sizes
from twinrun.workloads.training import layouts
from twinrun.workloads.training.duration import SWEEP_SECONDS, estimated_seconds
from twinrun.workloads.training.legs import leg_points, one_leg
from twinrun.workloads.training.manifest import (
    TrainingPlan,
    TrainingPoint,
    TrainingScale,
    TrainingTables,
    tables_of,
)
from twinrun.workloads.training.memory import Budget
from twinrun.workloads.workload import Choice, Hardware, Placement, PlanRequest, Point, WorkloadPlan


def plan(request: PlanRequest) -> WorkloadPlan:
    """Turn a request into a plan of one training configuration at several placements.

    Raises:
        InputError: a setting that does not exist or does not fit.
        MachineError: the model does not fit into the devices.
    """
    recipe, tables = request.recipe, tables_of(request.recipe)
    scale, overrides = tables.scale(request.scale), dict(request.overrides)
    requested, chosen = overrides.pop("devices", None), None
    if scale.sweep.layouts:
        chosen = layouts.names(tables, scale, overrides.pop("layouts", None))
    training = _training(tables, scale, overrides, recipe.manifest)
    because = "asked for" if "model" in overrides else "the recipe's for this scale"
    if chosen is None:
        counts = sizes(scale.sweep, requested=requested, devices=request.hardware.devices)
        places = [placement(scale.sweep, count) for count in counts]
        if scale.models and "model" not in overrides:
            training, because = _largest(tables, scale, training, places, request.hardware)
        _refuse_precision(training)
    shape = tables.models[training.model]
    _refuse_foreign(shape, training)
    legs = leg_points(
        scale.legs,
        shape,
        training,
        request.hardware,
        place=f"{recipe.manifest}:scales.{request.scale}.legs",
    )
    if request.leg is not None:
        points = one_leg(legs, request.leg, scale=request.scale)
    elif chosen is None:
        points = (*_points(shape, training, places, scale, request.hardware), *legs)
    else:
        given = {"wanted": chosen, "requested": requested, "manifest": recipe.manifest}
        points = layouts.points(tables, training, scale, request.hardware, **given)
    ids = ", ".join(point.id for point in points)
    return WorkloadPlan(
        part=TrainingPlan(shape=shape, training=training, data=tables.data[training.data]),
        points=points,
        choices=(
            Choice(name="model", value=training.model, because=because),
            Choice(name="points", value=ids, because=f"global batch {training.global_batch} at each"),
        ),
    )


def fingerprint(shape: AnyShape, training: Training) -> Fingerprint:
    """Return the fields that decide whether two runs are the same experiment."""
    return {
        "parameters": shape.parameters(),
        "vocabulary": shape.vocabulary,
        "sequence": shape.sequence,
        "global_batch": training.global_batch,
        "tokens_per_step": training.global_batch * shape.sequence,
        "precision": training.precision,
        "parameter_type": training.parameter_type,
        "attention": training.attention,
        "sharding": training.sharding,
        "activation_checkpointing": training.activation_checkpointing,
    }


def _training(
    tables: TrainingTables, scale: TrainingScale, overrides: dict[str, Any], manifest: str
) -> Training:
    training = overlay(tables.training, scale=scale.set, manifest=manifest, user=overrides)
    _known("model", training.model, tables.models)
    _known("data", training.data, tables.data)
    if training.warmup_steps >= training.steps:
        raise InputError(
            "no step would be timed",
            place="--set warmup_steps",
            found=f"{training.warmup_steps} of {training.steps} steps",
            allowed="fewer warm-up steps than steps",
        )
    if training.summation == "canonical" and training.trainer == "composer":
        raise InputError(
            "Composer sums in its own order",
            place="--set summation",
            found=training.summation,
            allowed="fast",
            hint="--set trainer=plain can sum in a tree",
        )
    return training


def _refuse_precision(training: Training) -> None:
    """Raise InputError for what only the trainer of layouts has."""
    if training.precision == "fp16":
        allowed = "fp32, bf16; DeepSpeed scales the loss, the other trainers do not"
        raise InputError("fp16 needs a scaled loss", place="--set precision", found="fp16", allowed=allowed)
    if training.trainer == "deepspeed":
        raise InputError(
            "this scale has no layouts", place="--set trainer", found="deepspeed", allowed="composer, plain"
        )


def _refuse_foreign(shape: AnyShape, training: Training) -> None:
    """Raise InputError for a setting that the model's family does not have."""
    for name, allowed in shape.fixed.items():
        if (found := getattr(training, name)) != allowed:
            raise InputError(
                f"the family `{shape.family}` has no such setting",
                place=f"--set {name}",
                found=found,
                allowed=allowed or "none",
                hint=f"leave it out, or choose a model of another family than {training.model}'s",
            )


def _known(key: str, name: str, table: dict[str, Any]) -> None:
    if name not in table:
        raise InputError(
            "no such name", place=f"--set {key}", found=name, allowed=list(table), hint=closest(name, table)
        )


def _largest(
    tables: TrainingTables,
    scale: TrainingScale,
    training: Training,
    places: list[Placement],
    hardware: Hardware,
) -> tuple[Training, str]:
    """Return the largest candidate that fits and whose sweep is short, and why it was taken."""
    world, longer = places[-1].world_size, ""
    candidates = [training.model_copy(update={"model": name}) for name in scale.models]
    for candidate in candidates:
        shape = tables.models[candidate.model]
        budget = Budget(shape=shape, training=candidate, device_memory_bytes=hardware.device_memory_bytes)
        if not budget.fits(world):
            continue
        seconds = [estimated_seconds(shape, candidate, hardware, world=one.world_size) for one in places]
        total = sum(one or 0.0 for one in seconds)
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


def _points(
    shape: AnyShape, training: Training, places: list[Placement], scale: TrainingScale, hardware: Hardware
) -> tuple[Point, ...]:
    budget = Budget(shape=shape, training=training, device_memory_bytes=hardware.device_memory_bytes)
    alone = [one.world_size for one in places] == [1] and scale.sweep.nodes is None
    for place in places:
        if training.global_batch % place.world_size:
            raise InputError(
                "the global batch does not divide over the devices",
                place="--set global_batch",
                found=training.global_batch,
                allowed=f"a multiple of {place.world_size}",
            )
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
        for number, place in enumerate(places)
        if budget.microbatches(place.world_size)
    )
    if not points:
        raise budget.too_small(places[-1].world_size)
    return points
