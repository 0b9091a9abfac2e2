"""The points of a training: sizes of a sweep, layouts of one, and the legs that go on from each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from twinrun.foundation.errors import InputError, MachineError, require_known
from twinrun.protocol.allocation import Placement
from twinrun.protocol.layout import PROCESSOR_RANKS, Layout
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import PLAIN, Training
from twinrun.workloads.training.estimates import Budget
from twinrun.workloads.training.manifest import (
    LayoutEngine,
    Leg,
    TrainingPoint,
    TrainingTables,
    leg_names,
)
from twinrun.workloads.training.refusals import refuse_composer
from twinrun.workloads.workload import Hardware, LegSteps, PlanRequest, Point

Points = tuple[Point[TrainingPoint], ...]


def budget_of(shape: AnyShape, training: Training, places: Sequence[Placement], hardware: Hardware) -> Budget:
    """Return the memory of a sweep over `places`; a device that is the whole sweep shards nothing."""
    if [(one.id.partition("=")[0], one.world_size) for one in places] == [("devices", 1)]:
        training = training.model_copy(update={"sharding": "none"})
    return Budget(shape=shape, training=training, hardware=hardware)


def sized_points(
    shape: AnyShape, training: Training, places: Sequence[Placement], hardware: Hardware
) -> Points:
    """Return the points of a sweep over sizes that hold the model, the first with its control runs.

    Raises:
        InputError: the global batch does not divide over the devices of one.
        MachineError: no size holds the model.
    """
    budget, controls, found = budget_of(shape, training, places, hardware), training.controls, []
    for world in (one.world_size for one in places if training.global_batch % one.world_size):
        message, allowed = "the global batch does not divide over the devices", f"a multiple of {world}"
        batch = training.global_batch
        raise InputError(message, place="--set global_batch", found=batch, allowed=allowed)
    for place in places:
        world = place.world_size
        if sizes := budget.microbatches(world):
            part = TrainingPoint(microbatches=sizes, sharding=budget.training.sharding, controls=controls)
            seconds = budget.seconds(world, runs=1 + controls)
            found.append(Point(**place.model_dump(), part=part, seconds=seconds))
            controls = 0
    if not found:
        raise budget.too_small(places[-1].world_size)
    return tuple(found)


def leg_points(legs: Sequence[Leg], shape: AnyShape, training: Training, request: PlanRequest) -> Points:
    """Return a point for each leg, in their order.

    Raises:
        InputError: together they are not the run's steps, or one is too short to be timed.
        MachineError: the model does not fit into the devices of a leg.
    """
    place, hardware = f"{request.recipe.manifest}:scales.{request.scale}.legs", request.hardware
    ends, found = list(accumulate(leg.steps for leg in legs)), []
    if legs and ends[-1] != training.steps:
        allowed = f"{training.steps}, the setting `steps`"
        message = "the legs together are not the steps of the run"
        raise InputError(message, place=place, found=f"{ends[-1]} steps", allowed=allowed)
    for number, (leg, end) in enumerate(zip(legs, ends, strict=True), start=1):
        if leg.steps <= training.warmup_steps:
            allowed = f"more than {training.warmup_steps}, the setting `warmup_steps`"
            at, message = f"{place}.{number - 1}.steps", "no step of this leg would be timed"
            raise InputError(message, place=at, found=leg.steps, allowed=allowed)
        vendor = leg.vendor or hardware.vendor
        processor = vendor == hardware.processor
        without = {"gpu": None, "device_memory_bytes": None, "devices": 0}
        here = hardware.model_copy(update=without) if processor else hardware
        refuse_composer(training, here)
        own: dict[str, Any] = {"microbatch": leg.microbatch or training.microbatch, "steps": leg.steps}
        own |= {"sharding": "none"} if leg.devices == 1 else {}
        budget = Budget(shape=shape, training=training.model_copy(update=own), hardware=here)
        sizes = budget.microbatches(leg.devices)
        if training.global_batch % leg.devices or not sizes:
            raise budget.too_small(leg.devices)
        steps = LegSteps(
            number=number,
            vendor=vendor,
            processor=processor,
            begin=end - leg.steps,
            end=end,
            last=number == len(legs),
        )
        part = TrainingPoint(microbatches=sizes, sharding=budget.training.sharding, leg=steps)
        at, seconds = leg_names(len(legs))[number - 1], budget.seconds(leg.devices)
        found.append(Point(id=at, nodes=1, devices_per_node=leg.devices, part=part, seconds=seconds))
    return tuple(found)


def one_leg(points: Points, number: int, *, scale: str) -> Points:
    """Return the point of one leg; raises InputError where the scale has no such leg."""
    if not 1 <= number <= len(points):
        allowed = f"1 to {len(points)}" if points else f"none: the scale `{scale}` has no legs"
        raise InputError("no such leg", place="--leg", found=number, allowed=allowed)
    return (points[number - 1],)


def layout_points(
    request: PlanRequest[TrainingTables], training: Training, wanted: tuple[str, ...], requested: Any
) -> Points:
    """Return a point for each layout that these devices can have.

    Args:
        requested: what `--set devices=` asked for, or None.

    Raises:
        InputError: a layout that does not fit its engine, the model or the batch.
        MachineError: there are too few devices for all of them.
    """
    tables, hardware = request.recipe.tables, request.hardware
    per_node = tables.scale(request.scale).sweep.devices_per_node
    trainer = tables.engine.name if tables.engine else PLAIN
    if training.trainer != trainer:
        allowed = f"{trainer}: it trains each layout, those of PyTorch alone too"
        message = "layouts have one trainer"
        raise InputError(message, place="--set trainer", found=training.trainer, allowed=allowed)
    found = []
    for name in wanted:
        layout, place = tables.layouts[name], f"{request.recipe.manifest}:layouts.{name}"
        world = layout.devices or per_node or _asked(requested)
        mine, chosen = trained(training, layout), world
        world = world or hardware.devices or max(PROCESSOR_RANKS, layout.least_devices())
        if hardware.devices and world > max(hardware.devices, per_node or 0):
            continue
        if chosen is None:
            # All devices of a machine, or as many as its batch divides over.
            counts = (one for one in range(world, 0, -1) if not any(_of_batch(layout, mine, one)))
            world = next(counts, world)
        require_known(mine.model, tables.models, "no such model", place=f"{place}.variant")
        shape = tables.models[mine.model]
        check_settings(layout, tables.engine, shape, place=f"{place}.settings")
        _check(layout, shape, mine, hardware, world=world, place=place)
        budget = Budget(shape=shape, training=mine, layout=layout, hardware=hardware)
        if sizes := budget.microbatches(world):
            # The point that others are held against shows the effect of rounding.
            controls = training.controls if layout.plain else 0
            part = TrainingPoint(
                microbatches=sizes, sharding=layout.sharding, layout=layout, shape=shape, controls=controls
            )
            seconds = budget.seconds(world, runs=1 + controls)
            found.append(Point(id=name, nodes=1, devices_per_node=world, part=part, seconds=seconds))
    if not found:
        raise MachineError(
            "no layout fits these devices",
            found=f"{hardware.devices} device(s), layouts {', '.join(wanted)}",
            hint="choose a smaller model, or --set layouts= for those that need fewer devices",
        )
    return tuple(found)


def _asked(requested: Any) -> int | None:
    """Return the count that `--set devices=` asked for; raises InputError where it is none."""
    if requested is None:
        return None
    text = str(requested[0] if isinstance(requested, list) and len(requested) == 1 else requested)
    if not text.isdecimal() or not int(text):
        message = "expected a count of devices"
        raise InputError(message, place="--set devices", found=requested, allowed="1, 2, ...")
    return int(text)


def trained(training: Training, layout: Layout | None) -> Training:
    """Return the training of a point, with the settings that its layout has of its own."""
    if layout is None:
        return training
    own: dict[str, Any] = {name: getattr(layout, name) for name in ("precision", "microbatch")}
    if layout.variant is not None:
        own["model"] = f"{training.model}-{layout.variant}"
    return training.model_copy(update={name: value for name, value in own.items() if value is not None})


def check_settings(layout: Layout, engine: LayoutEngine | None, shape: AnyShape, *, place: str) -> None:
    """Refuse settings that contradict what the recipe says, or that its engine has not; raises InputError."""
    if engine is None or layout.framework != engine.name:
        return
    given = layout.settings
    for name in given:
        if any(f"{name}.".startswith(f"{one}.") or one.startswith(f"{name}.") for one in engine.owns):
            raise InputError(
                "the recipe says this itself, and a second value could only contradict it",
                place=place,
                found=name,
                allowed="keys that neither the layout nor the training has",
                hint="change the layout, or --set the training's own setting",
            )
    for name in (*given, *engine.allowed) if engine.allowed else ():
        require_known(name, engine.allowed, "the engine has no such setting", place=place)
        found, reason = given.get(name), "no value of this setting, and a layout names every one"
        if found not in engine.allowed[name]:
            raise InputError(reason, place=f"{place}.{name}", found=found, allowed=engine.allowed[name])
    for name, length in itertools.product(engine.divisors, ("width", "sequence")):
        if (size := getattr(shape, length)) % given[name]:
            allowed, reason = f"a divisor of {size}", f"it divides the model's {length}"
            hint = "change the layout, or --set model="
            raise InputError(reason, place=f"{place}.{name}", found=given[name], allowed=allowed, hint=hint)


def _check(
    layout: Layout, shape: AnyShape, training: Training, hardware: Hardware, *, world: int, place: str
) -> None:
    """Raise InputError for the first that stands against a layout, whatever its engine."""
    for key, allowed, reason in (
        *_of_framework(layout, shape, training, hardware),
        *_of_batch(layout, training, world),
    ):
        # Of the training, where the layout has none of its own.
        chosen = {"devices": world, "precision": training.precision, "microbatch": training.microbatch}
        found = chosen.get(key, getattr(layout, key, None))
        raise InputError(reason, place=f"{place}.{key}", found=found, allowed=allowed)


def _of_framework(
    layout: Layout, shape: AnyShape, training: Training, hardware: Hardware
) -> Iterator[tuple[str, str, str]]:
    own, plain = layout.framework == "torch", Layout()
    for key in ("zero", "offload", "storage", "pipeline", "tensor", "experts", "settings"):
        if own and getattr(layout, key) != getattr(plain, key):
            yield key, "nothing", "PyTorch's own data parallelism has no such setting"
    if training.compile and getattr(shape, "experts", None):
        yield "variant", "no experts with compile", "experts get other numbers of tokens in each step"
    if training.validation and not own:
        yield "framework", "torch with training.validation", "a framework's own engine has no validation here"
    if training.precision == "fp16" and hardware.device_memory_bytes is None:
        yield "precision", "fp32, bf16", "no fp16 on a processor"
    if training.precision == "fp16" and own and layout.sharding == "full":
        yield "precision", "fp32, bf16", "gradients of fp16 need a scaled loss, which FSDP2 has not here"


def _of_batch(layout: Layout, training: Training, world: int) -> Iterator[tuple[str, str, str]]:
    least, batch = layout.least_devices(), training.global_batch
    if world % least:
        yield "devices", f"a multiple of {least}", "a replica of the model has all its ranks"
        return
    share, rest = divmod(batch, world // layout.replicas)
    if rest:
        yield "devices", f"a divisor of the global batch, {batch}", "every replica trains as much"
    elif training.microbatch != "auto" and share % training.microbatch:
        yield "microbatch", f"a divisor of {share}, the sequences of a replica", "microbatches are equal"
