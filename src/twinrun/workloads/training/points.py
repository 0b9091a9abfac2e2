"""The points of a training: sizes of a sweep, layouts of one, and the legs that go on from each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from twinrun.foundation.errors import InputError, MachineError, require_known
from twinrun.protocol.allocation import Placement
from twinrun.protocol.layout import PROCESSOR_RANKS
from twinrun.protocol.training import PLAIN, Training
from twinrun.workloads.training.estimates import Budget
from twinrun.workloads.training.manifest import Leg, TrainingPoint, TrainingTables, leg_names, trained
from twinrun.workloads.training.refusals import of_composer, of_layout, of_ranks, of_sizes, raise_first
from twinrun.workloads.workload import LegSteps, PlanRequest, Point

Points = list[Point[TrainingPoint]]
Request = PlanRequest[TrainingTables]


def sized_points(request: Request, training: Training, places: Sequence[Placement]) -> Points:
    """Return the points of a sweep over sizes that hold the model, the first with its control runs.

    Raises:
        InputError: the global batch does not divide over the devices of one.
        MachineError: no size holds the model.
    """
    raise_first(of_sizes(training, (one.world_size for one in places)))
    budget, found = budget_of(request, training, places), Points()
    for place in places:
        controls = 0 if found else training.controls
        if point := budget.point(place, request.node_devices, controls=controls):
            found.append(point)
    if not found:
        raise budget.too_small(places[-1].world_size)
    return found


def budget_of(request: Request, training: Training, places: Sequence[Placement]) -> Budget:
    """Return the memory of a sweep over `places`; a device that is the whole sweep shards nothing."""
    if [(one.id.partition("=")[0], one.world_size) for one in places] == [("devices", 1)]:
        training = training.model_copy(update={"sharding": "none"})
    shape = request.recipe.tables.models[training.model]
    return Budget(shape=shape, training=training, hardware=request.hardware)


def leg_points(request: Request, training: Training, legs: Sequence[Leg]) -> Points:
    """Return a point for each leg, in their order.

    Raises:
        InputError: together they are not the run's steps, or one is too short to be timed.
        MachineError: the model does not fit into the devices of a leg.
    """
    place, hardware = f"{request.recipe.manifest}:scales.{request.scale}.legs", request.hardware
    ends, found = list(accumulate(leg.steps for leg in legs)), Points()
    if legs and ends[-1] != training.steps:
        message, allowed = (
            "the legs together are not the steps of the run",
            f"{training.steps}, the setting `steps`",
        )
        raise InputError(message, place=place, found=f"{ends[-1]} steps", allowed=allowed)
    for number, (leg, end, name) in enumerate(zip(legs, ends, leg_names(len(legs)), strict=True), start=1):
        if leg.steps <= training.warmup_steps:
            allowed = f"more than {training.warmup_steps}, the setting `warmup_steps`"
            at, message = f"{place}.{number - 1}.steps", "no step of this leg would be timed"
            raise InputError(message, place=at, found=leg.steps, allowed=allowed)
        vendor, here = leg.vendor or hardware.vendor, hardware
        own: dict[str, Any] = {"microbatch": leg.microbatch or training.microbatch, "steps": leg.steps}
        own |= {"sharding": "none"} if leg.devices == 1 else {}
        if processor := vendor == hardware.processor:
            here = hardware.model_copy(update={"gpu": None, "device_memory_bytes": None, "devices": 0})
        raise_first(of_composer(training, here), of_sizes(training, (leg.devices,)))
        shape = request.recipe.tables.models[training.model]
        budget = Budget(shape=shape, training=training.model_copy(update=own), hardware=here)
        told = LegSteps(
            number=number,
            vendor=vendor,
            processor=processor,
            begin=end - leg.steps,
            end=end,
            last=number == len(legs),
        )
        placed = Placement(id=name, nodes=1, devices_per_node=leg.devices)
        point = budget.point(placed, request.node_devices, leg=told)
        if point is None:
            raise budget.too_small(leg.devices)
        found.append(point)
    return found


def layout_points(request: Request, training: Training, names: Sequence[str], asked: int | None) -> Points:
    """Return a point for each layout that these devices can have.

    Args:
        asked: devices of a layout that names none, or None.

    Raises:
        InputError: a layout that does not fit its engine, the model or the batch.
        MachineError: there are too few devices for all of them.
    """
    tables, hardware, found = request.recipe.tables, request.hardware, Points()
    per_node = tables.scale(request.scale).sweep.devices_per_node
    trainer = tables.engine.name if tables.engine else PLAIN
    if training.trainer != trainer:
        allowed = f"{trainer}: it trains each layout, those of PyTorch alone too"
        message = "layouts have one trainer"
        raise InputError(message, place="--set trainer", found=training.trainer, allowed=allowed)
    for name in names:
        layout, place = tables.layouts[name], f"{request.recipe.manifest}:layouts.{name}"
        own, chosen = trained(training, layout), layout.devices or per_node or asked
        world = chosen or hardware.devices or max(PROCESSOR_RANKS, layout.least_devices())
        if hardware.devices and world > max(hardware.devices, per_node or 0):
            continue
        if chosen is None:
            # All devices of a machine, or as many as its batch divides over.
            counts = (one for one in range(world, 0, -1) if not any(of_ranks(layout, own, one, place=place)))
            world = next(counts, world)
        require_known(own.model, tables.models, "no such model", place=f"{place}.variant")
        shape, gpu = tables.models[own.model], hardware.device_memory_bytes is not None
        raise_first(
            of_layout(layout, tables.engine, shape, own, gpu=gpu, place=place),
            of_ranks(layout, own, world, place=place),
        )
        budget = Budget(shape=shape, training=own, layout=layout, hardware=hardware)
        placed = Placement(id=name, nodes=1, devices_per_node=world)
        # The point that others are held against shows the effect of rounding.
        controls = training.controls if layout.plain else 0
        if point := budget.point(placed, request.node_devices, shape=shape, controls=controls):
            found.append(point)
    if not found:
        raise MachineError(
            "no layout fits these devices",
            found=f"{hardware.devices} device(s), layouts {', '.join(names)}",
            hint="choose a smaller model, or --set layouts= for those that need fewer devices",
        )
    return found
