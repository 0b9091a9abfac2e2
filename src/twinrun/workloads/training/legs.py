"""The legs of one training: points that go on from each other, each on its own hardware."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from twinrun.foundation.errors import InputError
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import Training
from twinrun.workloads.training.estimates import Budget, estimated_seconds
from twinrun.workloads.training.manifest import Leg, TrainingPoint, leg_names
from twinrun.workloads.training_terms import refuse_composer
from twinrun.workloads.workload import Hardware, LegSteps, Point


def leg_points(
    legs: Sequence[Leg], shape: AnyShape, training: Training, hardware: Hardware, *, place: str
) -> tuple[Point[TrainingPoint], ...]:
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
    return tuple(_leg_points(legs, shape, training, hardware, place))


def _leg_points(
    legs: Sequence[Leg], shape: AnyShape, training: Training, hardware: Hardware, place: str
) -> Iterator[Point[TrainingPoint]]:
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
        refuse_composer(training, here)
        own = training.model_copy(
            update={"microbatch": leg.microbatch or training.microbatch, "steps": leg.steps}
        )
        sharding = "none" if leg.devices == 1 else training.sharding
        held = own.model_copy(update={"sharding": sharding})
        budget = Budget(shape=shape, training=held, device_memory_bytes=here.device_memory_bytes)
        microbatches = budget.microbatches(leg.devices)
        if training.global_batch % leg.devices or not microbatches:
            raise budget.too_small(leg.devices)
        yield Point(
            id=leg_names(len(legs))[number - 1],
            nodes=1,
            devices_per_node=leg.devices,
            part=TrainingPoint(
                microbatches=microbatches,
                sharding=held.sharding,
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


def one_leg(
    points: Sequence[Point[TrainingPoint]], number: int, *, scale: str
) -> tuple[Point[TrainingPoint], ...]:
    """Return the point of one leg; raises InputError where the scale has no such leg."""
    if not 1 <= number <= len(points):
        raise InputError(
            "no such leg",
            place="--leg",
            found=number,
            allowed=f"1 to {len(points)}" if points else f"none: the scale `{scale}` has no legs",
        )
    return (points[number - 1],)
