"""What a point will need before anything runs: microbatches worth trying, a step, the wall time."""

from __future__ import annotations

import math

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import GIB
from twinrun.predict.calibration import calibration
from twinrun.predict.memory import memory
from twinrun.predict.parallel_layout import GIGABIT, Machines
from twinrun.predict.prediction import Prediction, predict
from twinrun.protocol.layout import Layout
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import COMPOSER, PLAIN, Training
from twinrun.workloads.training.sharing import parallel_layout
from twinrun.workloads.workload import Hardware

# The estimate is 0.95 to 1.04 times the recorded peaks of H100s and H200s, all of which
# tests/workloads/test_estimates.py has. What was estimated at 0.985 of a device's memory ran; what was at
# 0.9997 and more did not.
MOST_OF_MEMORY = 0.992
MAX_ATTEMPTS = 6
# The generation of software that this project's loops are.
SOFTWARE = "twinrun-2026"
# One core of a two-core machine reached 3e10 FLOP/s with the smoke model in fp32.
CORE_FLOPS = 2.5e10
# Bytes of a rank on a processor beside the model: interpreter, framework, and pages of their files.
PROCESS_BYTES = 820 << 20
# Seconds: the ranks of a point start; a whole model, or one block of each kind, is compiled.
POINT_START, WHOLE_COMPILATION, BLOCK_COMPILATION = 12.0, 22.0, 12.0
CPU_START = 10.0
# A sweep that nobody asked to be longer ends in about this time.
SWEEP_SECONDS = 360.0


class Budget(Frozen):
    """A model and the memory of the devices it is to train on."""

    shape: AnyShape
    training: Training
    layout: Layout | None = None
    """How the ranks share the work where that is more than sharding."""
    device_memory_bytes: int | None
    """None on a CPU, where the recipe names sizes that fit."""

    def needed(self, *, microbatch: int, world: int) -> int:
        """Estimate the bytes one of `world` devices needs."""
        shared = parallel_layout(self.training, self.layout, microbatch=microbatch)
        return memory(self.shape.work(), shared, devices=world).bytes

    def microbatches(self, world: int) -> tuple[int, ...]:
        """Return the microbatches to try at `world` devices, largest first; may be empty."""
        copies = world // self.layout.replicas if self.layout else world
        divisors = _divisors(self.training.global_batch // copies)
        if self.training.microbatch != "auto":
            return _only(self.training.microbatch, divisors)
        if self.device_memory_bytes is None:
            return divisors[:1]
        limit = MOST_OF_MEMORY * self.device_memory_bytes
        fitting = [size for size in divisors if self.needed(microbatch=size, world=world) <= limit]
        return tuple(fitting[:MAX_ATTEMPTS])

    def fits(self, world: int) -> bool:
        """Say whether `world` devices hold the model and divide the global batch."""
        return self.training.global_batch % world == 0 and bool(self.microbatches(world))

    def too_small(self, world: int) -> MachineError:
        """Return the error for a model that fits at no point."""
        return MachineError(
            f"{self.training.model} does not fit into {world} device(s)",
            found=f"{self.needed(microbatch=1, world=world) / GIB:.0f} GiB per device at microbatch 1",
            allowed=f"{(self.device_memory_bytes or 0) / GIB:.0f} GiB",
            hint="choose a smaller model, --set activation_checkpointing=true, or more devices",
        )


def processor_bytes(
    shape: AnyShape, training: Training, layout: Layout | None, *, microbatch: int, world: int
) -> int:
    """Estimate the resident memory of all ranks of a training on a processor."""
    whole = training.model_copy(update={"sharding": "none"})
    budget = Budget(shape=shape, training=whole, layout=layout, device_memory_bytes=None)
    return world * (PROCESS_BYTES + budget.needed(microbatch=microbatch, world=world))


def _only(microbatch: int, divisors: tuple[int, ...]) -> tuple[int, ...]:
    if microbatch not in divisors:
        raise InputError(
            "the microbatch does not divide the batch of one device",
            place="--set microbatch",
            found=microbatch,
            allowed=divisors,
        )
    return (microbatch,)


def _divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number`, largest first."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}, reverse=True))


def estimated_seconds(
    shape: AnyShape, training: Training, hardware: Hardware, *, world: int, layout: Layout | None = None
) -> float | None:
    """Estimate the wall time of one point on `world` devices; None where its steps cannot be predicted.

    On a processor the steps are its FLOP over what a core reached.
    """
    if hardware.gpu is None:
        flops = shape.flops_per_token() * training.global_batch * shape.sequence * training.steps
        return None if hardware.devices else CPU_START + flops / (CORE_FLOPS * hardware.cores)
    memory = hardware.device_memory_bytes
    budget = Budget(shape=shape, training=training, layout=layout, device_memory_bytes=memory)
    sizes = budget.microbatches(world) if layout or training.global_batch % world == 0 else ()
    if not sizes:
        return None
    nodes = max(1, world // hardware.devices) if hardware.devices else 1
    found = predicted(
        shape, training, layout, hardware, nodes=nodes, devices_per_node=world // nodes, microbatch=sizes[0]
    )
    if found.time is None:
        return None
    compilation = WHOLE_COMPILATION if world == 1 else BLOCK_COMPILATION
    start = POINT_START + (compilation if training.compile else 0.0)
    return start + found.time.seconds * training.steps


def predicted(
    shape: AnyShape,
    training: Training,
    layout: Layout | None,
    hardware: Hardware,
    *,
    nodes: int,
    devices_per_node: int,
    microbatch: int,
) -> Prediction:
    """Predict a step of a training on GPUs, by this project's own rows; plans have no other model of time."""
    assert hardware.gpu
    known = calibration()
    network = None if hardware.network_gbit_s is None else hardware.network_gbit_s * GIGABIT
    return predict(
        shape,
        Machines(hardware.gpu, devices_per_node, nodes, network),
        parallel_layout(training, layout, microbatch=microbatch),
        software=known.of(SOFTWARE),
        calibration=known,
        checked=True,
        unknown=_unknown(training, shape),
    )


def _unknown(training: Training, shape: AnyShape) -> str | None:
    """Return why the time of a training cannot be said, and which measurement would tell."""
    if training.precision not in {"bf16", "fp8"}:
        return f"every row that was fitted is in bf16 or fp8; a record in {training.precision} would tell"
    if training.trainer not in (COMPOSER, PLAIN):
        return f"no run of {training.trainer} on these GPUs was fitted; this run's own record would tell"
    if not training.compile:
        return "no run of this project without compiled blocks was fitted; this run's own record would tell"
    if shape.attention_heads() and training.attention != "sdpa":
        return f"no training with attention={training.attention} was fitted; this run's record would tell"
    if shape.work().block.scanned and training.kernels != "ours":
        return f"no scan of kernels={training.kernels} was timed; recipes/mamba-kernels would tell"
    return None
