"""What a point will need before anything runs: the microbatches worth trying on a device, and the time."""

from __future__ import annotations

import math

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.manifest import Frozen
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import Training
from twinrun.workloads.workload import Hardware

# The estimate is 0.94 to 1.05 times the recorded peaks of H100s and H200s, all of which
# tests/workloads/test_estimates.py has. What was estimated at 1.001 of a device's memory ran; what was at
# 1.016 and more did not.
MOST_OF_MEMORY = 1.008
MAX_ATTEMPTS = 6
GIB = 1 << 30
PARAMETER_BYTES = {"fp32": 4, "bf16": 2}
# A model that is whole on its device casts its fp32 parameters to 16 bits, for the backward pass too.
CAST_BYTES = 2
# DDP reduces gradients in buckets of their own.
BUCKET_BYTES = 4
# FSDP gathers blocks ahead of their use: 16-bit parameters and fp32 gradients, of two blocks at a time.
GATHERED_BYTES = 12
# H100s reach 0.49 to 0.60 of the dense peak, H200s 0.55 to 0.61, MI250s as published 0.44 to 0.46; where
# blocks are not compiled, H200s reach 0.41 to 0.51.
COMPILED_SHARE, EAGER_SHARE = 0.57, 0.48
# One core of a two-core machine reached 3e10 FLOP/s with the smoke model in fp32.
CORE_FLOPS = 2.5e10
# What a rank on a processor holds beside the model: interpreter, framework, and pages of their files.
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
        training, sharded = self.training, self.training.sharding == "full"
        counted = self.shape.memory_bytes(
            microbatch=microbatch,
            shards=world if sharded else 1,
            # The plain loop keeps all whatever was asked for.
            checkpointing=training.trainer != "plain" and training.activation_checkpointing,
            unsharded=sharded and training.reduction == "step",
            parameter_bytes=PARAMETER_BYTES[training.parameter_type],
        )
        beside = beside_state(self.shape, training, sharded=sharded, buckets=world > 1)
        return counted + self.shape.head_bytes(microbatch) + beside

    def microbatches(self, world: int) -> tuple[int, ...]:
        """Return the microbatches to try at `world` devices, largest first; may be empty."""
        divisors = _divisors(self.training.global_batch // world)
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


def beside_state(shape: AnyShape, training: Training, *, sharded: bool, buckets: bool) -> int:
    """Return the bytes that a device keeps of parameters and gradients beside their state.

    Args:
        buckets: gradients of whole models are reduced between devices.
    """
    count = shape.parameters()
    if sharded:
        return GATHERED_BYTES * count // getattr(shape, "layers", 1)
    cast = training.precision != "fp32" and training.parameter_type == "fp32"
    return count * ((CAST_BYTES if cast else 0) + (BUCKET_BYTES if buckets else 0))


def processor_bytes(shape: AnyShape, training: Training, *, microbatch: int, world: int) -> int:
    """Estimate the resident memory of all ranks of a training on a processor."""
    whole = training.model_copy(update={"sharding": "none"})
    budget = Budget(shape=shape, training=whole, device_memory_bytes=None)
    state = budget.needed(microbatch=0, world=world)
    # Families count activations of 16 bits.
    wide = 2 if training.precision == "fp32" else 1
    return world * (
        PROCESS_BYTES + state + wide * (budget.needed(microbatch=microbatch, world=world) - state)
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
