"""One run in stretches, each on hardware of its own: the points that legs are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from twinrun.foundation.errors import InputError, MachineError
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import Training
from twinrun.workloads.training.duration import estimated_seconds
from twinrun.workloads.training.manifest import Leg, LegSteps, TrainingPoint, leg_names
from twinrun.workloads.training.memory import Budget
from twinrun.workloads.workload import Hardware, LegPosition, Point


def leg_points(
    legs: Sequence[Leg], shape: AnyShape, training: Training, hardware: Hardware, *, place: str
) -> tuple[Point, ...]:
    """Return a point for each leg, in their order.

    Args:
        place: of the legs in recipe.toml, for messages.

    Raises:
        InputError: together they are not the run's steps, or one is too short to be timed.
        MachineError: the model does not fit into the devices of a leg.
    """
    if legs and sum(leg.steps for leg in legs) != training.steps:
        raise InputError(
            "the legs together are not the steps of the run",
            place=place,
            found=f"{sum(leg.steps for leg in legs)} steps",
            allowed=f"{training.steps}, the setting `steps`",
        )
    return tuple(_points(legs, shape, training, hardware, place))


def _points(
    legs: Sequence[Leg], shape: AnyShape, training: Training, hardware: Hardware, place: str
) -> Iterator[Point]:
    for number, (leg, end) in enumerate(
        zip(legs, accumulate(leg.steps for leg in legs), strict=True), start=1
    ):
        if leg.steps <= training.warmup_steps:
            raise InputError(
                "no step of this leg would be timed",
                place=f"{place}.{number - 1}.steps",
                found=leg.steps,
                allowed=f"more than {training.warmup_steps}, the setting `warmup_steps`",
            )
        vendor = leg.vendor or hardware.vendor
        processor = vendor == hardware.processor
        here = hardware.model_copy(update={"gpu": None, "device_memory_bytes": None, "devices": 0})
        here = here if processor else hardware
        own = training.model_copy(
            update={"microbatch": leg.microbatch or training.microbatch, "steps": leg.steps}
        )
        budget = Budget(shape=shape, training=own, device_memory_bytes=here.device_memory_bytes)
        microbatches = budget.microbatches(leg.devices)
        if training.global_batch % leg.devices or not microbatches:
            raise budget.too_small(leg.devices)
        yield Point(
            id=leg_names(len(legs))[number - 1],
            nodes=1,
            devices_per_node=leg.devices,
            part=TrainingPoint(
                microbatches=microbatches,
                sharding="none" if leg.devices == 1 else training.sharding,
                leg=LegSteps(
                    number=number,
                    vendor=vendor,
                    processor=processor,
                    begin=end - leg.steps,
                    end=end,
                    last=number == len(legs),
                ),
            ),
            seconds=estimated_seconds(shape, own, here, world=leg.devices),
        )


def one_leg(points: Sequence[Point], number: int, *, scale: str) -> tuple[Point, ...]:
    """Return the point of one leg; raises InputError where the scale has no such leg."""
    if not 1 <= number <= len(points):
        raise InputError(
            "no such leg",
            place="--leg",
            found=number,
            allowed=f"1 to {len(points)}" if points else f"none: the scale `{scale}` has no legs",
        )
    return (points[number - 1],)


def refuse_elsewhere(points: Sequence[Point], hardware: Hardware) -> None:
    """Raise MachineError for a leg whose hardware this machine does not have."""
    for point, leg in ((point, leg) for point in points if (leg := stretch_of(point))):
        hint = f"run it where its hardware is: --leg {leg.number} --from PLACE of the leg before"
        if leg.vendor not in (hardware.vendor, hardware.processor):
            raise MachineError(
                "a leg for hardware of another vendor",
                place=f"leg {leg.number}",
                found=hardware.vendor,
                allowed=leg.vendor,
                hint=hint,
            )
        if not leg.processor and hardware.devices and point.devices_per_node > hardware.devices:
            raise MachineError(
                "a leg for more devices than this machine has",
                place=f"leg {leg.number}",
                found=hardware.devices,
                allowed=f"{point.devices_per_node} or more",
                hint=hint,
            )


def continued(point: Point) -> LegPosition | None:
    """Return from which point's checkpoint a leg goes on; None for a point that is no leg."""
    leg = stretch_of(point)
    if leg is None:
        return None
    previous = f"leg={leg.number - 1}" if leg.number > 1 else None
    return LegPosition(number=leg.number, previous=previous, begin=leg.begin, end=leg.end)


def stretch_of(point: Point) -> LegSteps | None:
    """Return the leg that a planned point is."""
    assert isinstance(point.part, TrainingPoint)
    return point.part.leg
