"""A sweep over layouts: which ranks each has, and what is refused before anything starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from twinrun.foundation.errors import InputError, MachineError, require_known
from twinrun.protocol.layout import DEEPSPEED, PROCESSOR_RANKS, Layout, refusals
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import PLAIN, Training
from twinrun.workloads.training.estimates import Budget, estimated_seconds
from twinrun.workloads.training.manifest import LayoutEngine, TrainingPoint, TrainingScale, TrainingTables
from twinrun.workloads.workload import Hardware, Point


def names(tables: TrainingTables, scale: TrainingScale, requested: Any) -> tuple[str, ...]:
    """Return the layouts of a sweep, or those that `--set layouts=` asked for; raises InputError."""
    if requested is None:
        return scale.sweep.layouts or ()
    wanted = requested if isinstance(requested, list) else str(requested).split(",")
    for name in wanted:
        require_known(str(name), tables.layouts, "no such layout", place="--set layouts")
    return tuple(dict.fromkeys(str(name) for name in wanted))


def points(
    tables: TrainingTables,
    training: Training,
    scale: TrainingScale,
    hardware: Hardware,
    *,
    wanted: tuple[str, ...],
    requested: Any,
    manifest: str,
) -> tuple[Point[TrainingPoint], ...]:
    """Return a point for each layout that these devices can have.

    Args:
        requested: what `--set devices=` asked for, or None.

    Raises:
        InputError: a layout that DeepSpeed refuses, or that does not fit the model or the batch.
        MachineError: there are too few devices for all of them.
    """
    trainer = tables.engine.name if tables.engine else PLAIN
    if training.trainer != trainer:
        allowed = f"{trainer}: it trains each layout, those of PyTorch alone too"
        raise InputError(
            "layouts have one trainer", place="--set trainer", found=training.trainer, allowed=allowed
        )
    found = []
    for name in wanted:
        layout, place = tables.layouts[name], f"{manifest}:layouts.{name}"
        world = ranks_of(layout, scale, hardware, requested)
        if hardware.devices and world > max(hardware.devices, scale.sweep.devices_per_node or 0):
            continue
        mine = trained(training, layout)
        if requested is None and not (layout.devices or scale.sweep.devices_per_node):
            world = _dividing(layout, mine, world)
        require_known(mine.model, tables.models, "no such model", place=f"{place}.variant")
        shape = tables.models[mine.model]
        check_settings(layout, tables.engine, shape, place=f"{place}.settings")
        _check(layout, shape, mine, world=world, hardware=hardware, place=place)
        memory = hardware.device_memory_bytes
        budget = Budget(shape=shape, training=mine, layout=layout, device_memory_bytes=memory)
        sizes = budget.microbatches(world)
        if sizes:
            # The point that others are held against shows the effect of rounding.
            controls = training.controls if layout.plain else 0
            part = TrainingPoint(
                microbatches=sizes, sharding=layout.sharding, layout=layout, shape=shape, controls=controls
            )
            repeated = mine.model_copy(update={"steps": mine.steps * (1 + controls)})
            seconds = estimated_seconds(shape, repeated, hardware, world=world, layout=layout)
            found.append(Point(id=name, nodes=1, devices_per_node=world, part=part, seconds=seconds))
    if not found:
        raise MachineError(
            "no layout fits these devices",
            found=f"{hardware.devices} device(s), layouts {', '.join(wanted)}",
            hint="choose a smaller model, or --set layouts= for those that need fewer devices",
        )
    return tuple(found)


def _dividing(layout: Layout, training: Training, most: int) -> int:
    """Return how many of a machine's devices a layout takes: all, or as many as its batch divides over."""
    return next((one for one in range(most, 0, -1) if not any(_of_batch(layout, training, one))), most)


def ranks_of(layout: Layout, scale: TrainingScale, hardware: Hardware, requested: Any) -> int:
    """Return how many ranks a layout has; those of a processor share its cores; raises InputError."""
    if layout.devices is not None:
        return layout.devices
    if scale.sweep.devices_per_node:
        return scale.sweep.devices_per_node
    if requested is not None:
        text = str(requested[0] if isinstance(requested, list) and len(requested) == 1 else requested)
        if not text.isdecimal() or not int(text):
            raise InputError(
                "expected a count of devices", place="--set devices", found=requested, allowed="1, 2, ..."
            )
        return int(text)
    return hardware.devices or max(PROCESSOR_RANKS, layout.least_devices())


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
    layout: Layout, shape: AnyShape, training: Training, *, world: int, hardware: Hardware, place: str
) -> None:
    for key, allowed, reason in (
        *refusals(layout),
        *_of_model(layout, shape, training),
        *_of_validation(layout, training),
        *_of_arithmetic(layout, training, hardware),
        *_of_batch(layout, training, world),
    ):
        # Of the training, where the layout has none of its own.
        chosen = {"devices": world, "precision": training.precision, "microbatch": training.microbatch}
        found = chosen.get(key, getattr(layout, key, None))
        raise InputError(reason, place=f"{place}.{key}", found=found, allowed=allowed)


def _of_model(layout: Layout, shape: AnyShape, training: Training) -> Iterator[tuple[str, str, str]]:
    experts: int = getattr(shape, "experts", None) or 0
    if experts and layout.framework == DEEPSPEED and layout.experts is None:
        yield "experts", "1 or more ranks", "the model has experts, which DeepSpeed spreads over ranks"
    if experts and training.compile:
        yield "variant", "no experts with compile", "experts get other numbers of tokens in each step"
    if layout.experts is not None and (not experts or experts % layout.experts):
        yield "experts", f"a divisor of {experts}, the model's experts", "experts are whole"
    if layout.replicas > 1 and (reason := shape.uncut()):
        yield "variant", "another model, or pipeline = 1 and tensor = 1", reason
    elif layout.replicas > 1:
        heads, layers = shape.key_heads(), getattr(shape, "layers", 0)
        if heads % layout.tensor:
            yield "tensor", f"a divisor of {heads}, the model's heads of keys", "heads are whole"
        if layout.pipeline > layers:
            yield "pipeline", f"1 to {layers}, the model's layers", "a stage has a layer"


def _of_validation(layout: Layout, training: Training) -> Iterator[tuple[str, str, str]]:
    if training.validation and layout.framework != "torch":
        yield "framework", "torch with training.validation", "a framework's own engine has no validation here"


def _of_arithmetic(layout: Layout, training: Training, hardware: Hardware) -> Iterator[tuple[str, str, str]]:
    if training.precision == "fp16" and hardware.device_memory_bytes is None:
        yield "precision", "fp32, bf16", "DeepSpeed has no fp16 on a processor"
    if training.precision == "fp16" and layout.framework == DEEPSPEED and not layout.zero:
        yield "zero", "1, 2, 3", "DeepSpeed's 16-bit optimizer without ZeRO takes a hidden step of its own"
    if training.precision == "fp16" and layout.sharding == "full":
        yield "precision", "fp32, bf16", "gradients of fp16 need a scaled loss, which FSDP2 has not here"
    if training.compile and layout.tensor > 1:
        yield "tensor", "1 with compile", "the collectives between the parts of a matrix cannot be traced"


def _of_batch(layout: Layout, training: Training, world: int) -> Iterator[tuple[str, str, str]]:
    least = layout.least_devices()
    if world % least:
        yield "devices", f"a multiple of {least}", "a replica of the model has all its ranks"
        return
    copies = world // layout.replicas
    if training.global_batch % copies:
        yield (
            "devices",
            f"a divisor of the global batch, {training.global_batch}",
            "every replica trains as much",
        )
        return
    share = training.global_batch // copies
    if training.microbatch != "auto" and share % training.microbatch:
        yield (
            "microbatch",
            f"a divisor of {share}, the sequences of a replica",
            "DeepSpeed's microbatches are equal",
        )
