"""What fits: the microbatches worth trying on one device."""

from __future__ import annotations

import math

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.manifest import Frozen
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import Training

# The estimate is 0.95 to 1.04 times the peaks recorded on H200s; the run itself finds out.
ESTIMATE_SLACK = 1.05
MAX_ATTEMPTS = 6
GIB = 1 << 30
PARAMETER_BYTES = {"fp32": 4, "bf16": 2}


class Budget(Frozen):
    """A model and the memory of the devices it is to train on."""

    shape: AnyShape
    training: Training
    device_memory_bytes: int | None
    """None on a CPU, where the recipe names sizes that fit."""
    state_bytes: int | None = None
    """Of parameters, gradients and optimizer, where a layout says more of them than sharding does."""

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
