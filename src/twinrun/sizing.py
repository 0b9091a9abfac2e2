"""What fits: the points of a sweep, and the microbatches worth trying on one device."""

from __future__ import annotations

import math
from typing import Any, Literal

from twinrun.benchmark import Settings
from twinrun.errors import InputError, MachineError
from twinrun.formulas import memory_bytes
from twinrun.manifest import Frozen
from twinrun.recipe import Sweep
from twinrun.training import ModelShape, Training

# formulas.memory_bytes is 0.95 to 1.04 times the peaks recorded on H200s; the run itself finds out.
ESTIMATE_SLACK = 1.05
MAX_ATTEMPTS = 6
GIB = 1 << 30


class Place(Frozen):
    """What is started as one: its name, and where its ranks go."""

    id: str
    nodes: int
    devices_per_node: int

    @property
    def world_size(self) -> int:
        """Ranks, one a device."""
        return self.nodes * self.devices_per_node


class Case(Place):
    """One process of a benchmark on one device."""

    settings: Settings
    """What its script is told."""


class Point(Place):
    """One run of a sweep."""

    microbatches: tuple[int, ...]
    """Sequences of one forward pass of one device, largest first; the first that fits is kept."""
    sharding: Literal["none", "full"] | None = None
    """Points of one sweep run the same program; a device that is the whole sweep shards nothing.

    Null in records from before it was written down; `PointRecord.parallelism` says what ran.
    """


class Budget(Frozen):
    """A model and the memory of the devices it is to train on."""

    shape: ModelShape
    training: Training
    device_memory_bytes: int | None
    """None on a CPU, where the recipe names sizes that fit."""

    def needed(self, *, microbatch: int, world: int) -> int:
        """Estimate the bytes one of `world` devices needs."""
        return memory_bytes(
            self.shape,
            microbatch=microbatch,
            shards=world if self.training.sharding == "full" else 1,
            checkpointing=self.training.activation_checkpointing,
            whole=self.training.sharding == "full" and self.training.reduction == "step",
        )

    def microbatches(self, world: int) -> tuple[int, ...]:
        """Return the microbatches to try at `world` devices, largest first; may be empty."""
        device_batch = self.training.global_batch // world
        divisors = _divisors(device_batch)
        if self.training.microbatch != "auto":
            return _only(self.training.microbatch, divisors)
        if self.device_memory_bytes is None:
            return divisors[:1]
        limit = ESTIMATE_SLACK * self.device_memory_bytes
        return tuple(size for size in divisors if self.needed(microbatch=size, world=world) <= limit)[
            :MAX_ATTEMPTS
        ]

    def fits(self, world: int) -> bool:
        """Say whether `world` devices hold the model and divide the global batch."""
        return self.training.global_batch % world == 0 and bool(self.microbatches(world))


def counts(sweep: Sweep, *, requested: Any, devices: int) -> tuple[int, ...]:
    """Return the sizes of a sweep: devices of this machine, or nodes of the published cluster.

    Args:
        requested: what `--set devices=` asked for, or None.
        devices: GPUs of this machine; 0 on a CPU, whose cores any number of ranks share.

    Raises:
        InputError: `requested` is not a list of counts, or the sweep counts nodes.
        MachineError: this machine has no GPU to sweep over, or too few.
    """
    if sweep.nodes is not None:
        if requested is not None:
            raise InputError("this scale counts nodes", place="--set devices", found=requested)
        return sweep.nodes
    if requested is not None:
        return _requested(requested, devices)
    if isinstance(sweep.devices, tuple):
        return _limited(sweep.devices, devices)
    if not devices:
        raise MachineError(
            "this scale sweeps over the GPUs of the machine",
            found="no GPU in use",
            hint="use --scale smoke, or --scale paper --dry",
        )
    return tuple(1 << power for power in range(devices.bit_length()) if 1 << power <= devices)


def points(sweep: Sweep, sizes: tuple[int, ...], budget: Budget) -> tuple[Point, ...]:
    """Return the points of a sweep that the devices hold.

    Raises:
        InputError: the global batch does not divide over the devices.
        MachineError: the model fits at no point.
    """
    alone = sizes == (1,) and sweep.nodes is None
    sharding = "none" if alone else budget.training.sharding
    made = [_point(sweep, size, sharding, budget) for size in sizes]
    kept = tuple(point for point in made if point.microbatches)
    if not kept:
        world = made[-1].world_size
        raise MachineError(
            f"{budget.training.model} does not fit into {world} device(s)",
            found=f"{budget.needed(microbatch=1, world=world) / GIB:.0f} GiB per device at microbatch 1",
            allowed=f"{(budget.device_memory_bytes or 0) / GIB:.0f} GiB",
            hint="choose a smaller model, --set activation_checkpointing=true, or more devices",
        )
    return kept


def world_size(sweep: Sweep, size: int) -> int:
    """Return the ranks at one size of a sweep."""
    return size * (sweep.devices_per_node or 1)


def _point(sweep: Sweep, size: int, sharding: Literal["none", "full"], budget: Budget) -> Point:
    world = world_size(sweep, size)
    if budget.training.global_batch % world:
        raise InputError(
            "the global batch does not divide over the devices",
            place="--set global_batch",
            found=budget.training.global_batch,
            allowed=f"a multiple of {world}",
        )
    counts_nodes = sweep.nodes is not None
    return Point(
        id=f"{'nodes' if counts_nodes else 'devices'}={size}",
        nodes=size if counts_nodes else 1,
        devices_per_node=world // size if counts_nodes else size,
        sharding=sharding,
        microbatches=budget.microbatches(world),
    )


def _only(microbatch: int, divisors: tuple[int, ...]) -> tuple[int, ...]:
    if microbatch not in divisors:
        raise InputError(
            "the microbatch does not divide the batch of one device",
            place="--set microbatch",
            found=microbatch,
            allowed=divisors,
        )
    return (microbatch,)


def _requested(requested: Any, devices: int) -> tuple[int, ...]:
    items = requested if isinstance(requested, list) else str(requested).split(",")
    numbers = [int(item) for item in items if type(item) is int or str(item).strip().isdecimal()]
    if not numbers or len(numbers) < len(items) or min(numbers) < 1:
        raise InputError(
            "expected counts of devices", place="--set devices", found=requested, allowed="for example 1,2,4"
        )
    if devices and max(numbers) > devices:
        raise MachineError(
            "this machine has fewer devices",
            place="--set devices",
            found=requested,
            allowed=f"1 to {devices}",
        )
    return tuple(sorted(set(numbers)))


def _limited(wanted: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """Drop the sizes of a sweep that this machine does not have; ranks share a CPU."""
    kept = tuple(count for count in wanted if not devices or count <= devices)
    if not kept:
        raise MachineError("this machine has fewer devices", found=devices, allowed=f"at least {min(wanted)}")
    return kept


def _divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number`, largest first."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}, reverse=True))
