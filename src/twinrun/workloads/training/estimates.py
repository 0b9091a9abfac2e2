"""What a point will need before anything runs: the microbatches worth trying on a device, and the time."""

from __future__ import annotations

import math

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import GIB
from twinrun.predict.memory import memory
from twinrun.protocol.layout import Layout
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import Training
from twinrun.workloads.training.sharing import parallel_layout
from twinrun.workloads.workload import Hardware

# The estimate is 0.96 to 1.04 times the recorded peaks of H100s and H200s, all of which
# tests/workloads/test_estimates.py has. What was estimated at 1.001 of a device's memory ran; what was at
# 1.016 and more did not.
MOST_OF_MEMORY = 1.008
MAX_ATTEMPTS = 6
# H100s reach 0.49 to 0.60 of the dense peak, H200s 0.55 to 0.61, MI250s as published 0.44 to 0.46; where
# blocks are not compiled, H200s reach 0.41 to 0.51.
COMPILED_SHARE, EAGER_SHARE = 0.57, 0.48
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


def estimated_seconds(shape: AnyShape, training: Training, hardware: Hardware, *, world: int) -> float | None:
    """Estimate the wall time of one point on `world` devices; None for a GPU without a known peak."""
    flops = shape.flops_per_token() * training.global_batch * shape.sequence * training.steps
    if training.activation_checkpointing is True and training.trainer != "plain":
        flops = flops * 4 // 3
    if hardware.gpu is None:
        return None if hardware.devices else CPU_START + flops / (CORE_FLOPS * hardware.cores)
    share = COMPILED_SHARE if training.compile else EAGER_SHARE
    compilation = WHOLE_COMPILATION if world == 1 else BLOCK_COMPILATION
    start = POINT_START + (compilation if training.compile else 0.0)
    return start + flops / (share * hardware.gpu.device_peak_flops * world)
