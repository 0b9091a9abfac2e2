"""What a point will need before anything runs: the microbatches worth trying on a device, and the time."""

from __future__ import annotations

import math

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.manifest import Frozen
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import Training
from twinrun.workloads.workload import Hardware

# The estimate is 0.95 to 1.04 times the peaks recorded on H200s; the run itself finds out.
ESTIMATE_SLACK = 1.05
MAX_ATTEMPTS = 6
GIB = 1 << 30
PARAMETER_BYTES = {"fp32": 4, "bf16": 2}
# H200s reach 0.55 to 0.61 of the dense peak, MI250s as published 0.44 to 0.46.
PEAK_SHARE = 0.45
# One core of a two-core machine reached 3e10 FLOP/s with the smoke model in fp32.
CORE_FLOPS = 2.5e10
# What a rank on a processor holds beside the model: interpreter, framework, and pages of their files.
PROCESS_BYTES = 820 << 20
# Ranks start, data is read, blocks are compiled: seconds.
GPU_START, CPU_START = 40.0, 10.0
# A sweep that nobody asked to be longer ends in about this time.
SWEEP_SECONDS = 360.0


class Budget(Frozen):
    """A model and the memory of the devices it is to train on."""

    shape: AnyShape
    training: Training
    device_memory_bytes: int | None
    """None on a CPU, where the recipe names sizes that fit."""
    state_bytes: int | None = None
    """Bytes of parameters, gradients and optimizer, where a layout says more of them than sharding does."""

    def needed(self, *, microbatch: int, world: int) -> int:
        """Estimate the bytes one of `world` devices needs."""
        counted = self._counted(microbatch=microbatch, world=world)
        if self.state_bytes is None:
            return counted
        # What more sequences add, beside the state that the layout has.
        return self.state_bytes + counted - self._counted(microbatch=0, world=world)

    def _counted(self, *, microbatch: int, world: int) -> int:
        return self.shape.memory_bytes(
            microbatch=microbatch,
            shards=world if self.training.sharding == "full" else 1,
            checkpointing=self.training.activation_checkpointing,
            unsharded=self.training.sharding == "full" and self.training.reduction == "step",
            parameter_bytes=PARAMETER_BYTES[self.training.parameter_type],
        )

    def microbatches(self, world: int) -> tuple[int, ...]:
        """Return the microbatches to try at `world` devices, largest first; may be empty."""
        divisors = _divisors(self.training.global_batch // world)
        if self.training.microbatch != "auto":
            return _only(self.training.microbatch, divisors)
        if self.device_memory_bytes is None:
            return divisors[:1]
        limit = ESTIMATE_SLACK * self.device_memory_bytes
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


def processor_bytes(shape: AnyShape, training: Training, *, microbatch: int, world: int) -> int:
    """Estimate the resident memory of all ranks of a training on a processor."""
    counted = {
        size: shape.memory_bytes(
            microbatch=size,
            shards=1,
            checkpointing=training.activation_checkpointing,
            unsharded=False,
            parameter_bytes=PARAMETER_BYTES[training.parameter_type],
        )
        for size in (0, microbatch)
    }
    # Families count activations of 16 bits.
    activations = (counted[microbatch] - counted[0]) * (2 if training.precision == "fp32" else 1)
    return world * (PROCESS_BYTES + counted[0] + activations)


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
    if hardware.gpu is not None:
        speed, start = PEAK_SHARE * hardware.gpu.device_peak_flops * world, GPU_START
    elif hardware.devices:
        return None
    else:
        speed, start = CORE_FLOPS * hardware.cores, CPU_START
    if training.activation_checkpointing is True:
        flops = flops * 4 // 3
    return start + flops / speed
