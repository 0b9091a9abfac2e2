"""The points of a training, by size, layout or leg, and what each needs: microbatches, memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, get_args

from twinrun.foundation.errors import InputError, MachineError, require_known
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import GIB
from twinrun.predict.calibration import SOFTWARE, Subject, calibration
from twinrun.predict.memory import memory
from twinrun.predict.parallel_layout import GIGABIT, Machines, ParallelLayout, Shards
from twinrun.predict.prediction import Prediction, kept, predict
from twinrun.protocol.allocation import Placement
from twinrun.protocol.layout import PROCESSOR_RANKS, Arithmetic, Layout
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import COMPOSER, PLAIN, Training
from twinrun.workloads.sweep import over_nodes
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint, TrainingTables, trained
from twinrun.workloads.training.refusals import of_composer, of_layout, of_ranks, of_sizes, raise_first
from twinrun.workloads.workload import Hardware, LegSteps, PlanRequest, Point

# The estimate is 0.95 to 1.04 times the recorded peaks of H100s and H200s, all of which
# tests/workloads/test_estimates.py has. What was estimated at 0.985 of a device's memory ran; what was at
# 0.9997 and more did not.
MOST_OF_MEMORY = 0.992
MAX_ATTEMPTS = 6
# One core of a two-core machine reached 3e10 FLOP/s with the smoke model in fp32.
CORE_FLOPS = 2.5e10
# Bytes of a rank on a processor beside the model: interpreter, framework, and pages of their files.
PROCESS_BYTES = 820 << 20
# Seconds: the ranks of a point start; a whole model, or one block of each kind, is compiled.
POINT_START, WHOLE_COMPILATION, BLOCK_COMPILATION = 12.0, 22.0, 12.0
CPU_START = 10.0
BYTES: dict[Arithmetic, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
STAGES: tuple[Shards, ...] = get_args(Shards)


class Budget(Frozen):
    """A training and the hardware that it is to run on: what fits, and how long it takes."""

    shape: AnyShape
    training: Training
    hardware: Hardware
    layout: Layout | None = None
    """How the ranks share the work where that is more than sharding."""

    def needed(self, *, microbatch: int, world: int) -> int:
        """Estimate the bytes one of `world` devices needs."""
        shared = parallel_layout(self.training, self.layout, microbatch=microbatch)
        return memory(self.shape.work(), shared, devices=world).bytes

    def microbatches(self, world: int) -> tuple[int, ...]:
        """Return the microbatches to try at `world` devices, largest first; may be empty.

        Raises:
            InputError: the one that was asked for does not divide the batch.
        """
        asked, most = self.training.microbatch, self.hardware.device_memory_bytes
        batch = self.training.global_batch // (world // self.layout.replicas if self.layout else world)
        divisors = tuple(size for size in range(batch, 0, -1) if batch % size == 0)
        if asked != "auto":
            if asked not in divisors:
                message = "the microbatch does not divide the batch of one device"
                raise InputError(message, place="--set microbatch", found=asked, allowed=divisors)
            return (asked,)
        # On a processor the recipe names sizes that fit.
        if most is None:
            return divisors[:1]
        fitting = [
            one for one in divisors if self.needed(microbatch=one, world=world) <= MOST_OF_MEMORY * most
        ]
        return tuple(fitting[:MAX_ATTEMPTS])

    def point(self, place: Placement, node_devices: int | None, **told: Any) -> Point[TrainingPoint] | None:
        """Return a point with its estimates, over the nodes that it needs; None where the model does not fit.

        Args:
            node_devices: devices of a node, of which a point fills as many as it needs; None: one has all.
            told: further fields of the point's part.
        """
        sizes = self.microbatches(place.world_size)
        if not sizes:
            return None
        sharding = (self.layout or self.training).sharding
        part = TrainingPoint(microbatches=sizes, sharding=sharding, layout=self.layout, **told)
        seconds = self.seconds(place.world_size, sizes[0], runs=1 + part.controls)
        point = over_nodes(Point(**place.model_dump(), part=part, seconds=seconds), node_devices)
        if self.hardware.gpu is None:
            return point
        nodes, each = point.nodes, point.devices_per_node
        found = (self.predicted(nodes=nodes, devices_per_node=each, microbatch=size) for size in sizes)
        predicted = tuple(kept(one, attempt=number) for number, one in enumerate(found))
        return point.model_copy(update={"predicted": predicted})

    def too_small(self, world: int) -> MachineError:
        """Return the error for a model that fits at no point."""
        return MachineError(
            f"{self.training.model} does not fit into {world} device(s)",
            found=f"{self.needed(microbatch=1, world=world) / GIB:.0f} GiB per device at microbatch 1",
            allowed=f"{(self.hardware.device_memory_bytes or 0) / GIB:.0f} GiB",
            hint="choose a smaller model, --set activation_checkpointing=true, or more devices",
        )

    def seconds(self, world: int, microbatch: int, *, runs: int = 1) -> float | None:
        """Estimate the wall time of a point with so many runs; None where its steps cannot be predicted.

        On a processor the steps are its FLOP over what a core reached.
        """
        training, hardware = self.training, self.hardware
        steps = training.steps * runs
        if hardware.gpu is None:
            flops = self.shape.flops_per_token() * training.global_batch * self.shape.sequence * steps
            return None if hardware.devices else CPU_START + flops / (CORE_FLOPS * hardware.cores)
        nodes = max(1, world // hardware.devices) if hardware.devices else 1
        found = self.predicted(nodes=nodes, devices_per_node=world // nodes, microbatch=microbatch)
        if found.time is None:
            return None
        compilation = WHOLE_COMPILATION if world == 1 else BLOCK_COMPILATION
        return POINT_START + (compilation if training.compile else 0.0) + found.time.seconds * steps

    def predicted(self, *, nodes: int, devices_per_node: int, microbatch: int) -> Prediction:
        """Predict a step on GPUs, by this project's own rows; plans have no other model of time."""
        hardware = self.hardware
        assert hardware.gpu
        network = None if hardware.network_gbit_s is None else hardware.network_gbit_s * GIGABIT
        machines = Machines(hardware.gpu, devices_per_node, nodes, network)
        layout = parallel_layout(self.training, self.layout, microbatch=microbatch)
        unknown = _unknown(self.training, self.shape)
        subject = Subject(self.shape, machines, layout, calibration().of(SOFTWARE))
        return predict(subject, unknown=unknown)


def processor_bytes(own: TrainingPlan, layout: Layout | None, microbatch: int, world: int) -> int:
    """Estimate the resident memory of all ranks of a training on a processor."""
    whole = own.training.model_copy(update={"sharding": "none"})
    shared = parallel_layout(whole, layout, microbatch=microbatch)
    return world * (PROCESS_BYTES + memory(own.shape.work(), shared, devices=world).bytes)


def parallel_layout(training: Training, layout: Layout | None, *, microbatch: int) -> ParallelLayout:
    """Return a training as predictions know it: who holds and computes what."""
    layout, width = layout or Layout(sharding=training.sharding), BYTES[training.precision]
    sharded, split = layout.sharding == "full", bool(layout.zero)
    return ParallelLayout(
        global_batch=training.global_batch,
        microbatch=microbatch,
        # The plain loop keeps all whatever was asked for.
        recomputation=training.trainer != PLAIN and training.activation_checkpointing,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        experts=layout.experts or 1,
        offload=layout.offload,
        shards="parameters" if sharded else STAGES[layout.zero],
        # An engine that splits keeps what it trains in 16 bits, and the fp32 copy with the optimizer.
        parameter_bytes=width if split else BYTES[training.parameter_type],
        masters=split,
        gradient_bytes=width if split else 4,
        reduced_bytes=width,
        kept_whole=training.reduction == "step" if sharded else STAGES[layout.zero] == "parameters",
        precision="fp8" if training.precision == "fp8" else "bf16",
    )


def _unknown(training: Training, shape: AnyShape) -> str | None:
    """Return why the time of a training cannot be said, and which measurement would tell."""
    fitted = {
        "precision": training.precision in {"bf16", "fp8"},
        "trainer": training.trainer in {COMPOSER, PLAIN},
        "compile": training.compile,
        "attention": training.attention == "sdpa" or not shape.attention_heads(),
        "kernels": training.kernels == "ours" or not shape.work().block.scanned,
    }
    odd = [f"{name}={getattr(training, name)}" for name, so in fitted.items() if not so]
    return f"no training with {odd[0]} was fitted; this run's own record would tell" if odd else None


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


def leg_points(request: Request, training: Training) -> Points:
    """Return a point for each leg, in their order.

    Raises:
        InputError: together they are not the run's steps, or one is too short to be timed.
        MachineError: the model does not fit into the devices of a leg.
    """
    place, hardware = f"{request.recipe.manifest}:scales.{request.scale}.legs", request.hardware
    scale = request.recipe.tables.scale(request.scale)
    ends, found = list(accumulate(leg.steps for leg in scale.legs)), Points()
    if ends and ends[-1] != training.steps:
        message, asked = "the legs together are not the steps of the run", training.steps
        allowed = f"{asked}, the setting `steps`"
        raise InputError(message, place=place, found=f"{ends[-1]} steps", allowed=allowed)
    for nth, (leg, end, name) in enumerate(zip(scale.legs, ends, scale.leg_names, strict=True), start=1):
        if leg.steps <= training.warmup_steps:
            allowed = f"more than {training.warmup_steps}, the setting `warmup_steps`"
            at, message = f"{place}.{nth - 1}.steps", "no step of this leg would be timed"
            raise InputError(message, place=at, found=leg.steps, allowed=allowed)
        vendor, begin, last = leg.vendor or hardware.vendor, end - leg.steps, end == ends[-1]
        own: dict[str, Any] = {"microbatch": leg.microbatch or training.microbatch, "steps": leg.steps}
        placed, here = Placement(id=name, nodes=1, devices_per_node=leg.devices), hardware
        if on := vendor == hardware.processor:
            here = hardware.model_copy(update={"gpu": None, "device_memory_bytes": None, "devices": 0})
        raise_first(of_composer(training, here), of_sizes(training, (leg.devices,)))
        told = LegSteps(number=nth, vendor=vendor, processor=on, begin=begin, end=end, last=last)
        own |= {"sharding": "none"} if leg.devices == 1 else {}
        shape = request.recipe.tables.models[training.model]
        budget = Budget(shape=shape, training=training.model_copy(update=own), hardware=here)
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
        wrong = of_layout(layout, shape, own, gpu=gpu, place=place)
        raise_first(wrong, of_ranks(layout, own, world, place=place))
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
