"""The memory that a device needs, part by part, and whether it has it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from twinrun.manifests.vendor import Gpu
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.protocol.models.shape import HEAD_TOKENS, LOGIT_BYTES
from twinrun.protocol.work import ModelWork

GIB = 1 << 30
# Devices have up to 7 % more than the data sheet's decimal gigabytes; the runtime's context takes of it.
CAPACITY, CONTEXT = 1.06, GIB // 2
# Estimates were 0.93 to 1.11 times the 62 recorded peaks above 32 GiB, 1.9 % off on average.
SPREAD = 0.07
# Two moments of Adam for each parameter.
MOMENTS = 2
Fit = Literal["FITS", "AT RISK", "DOES NOT FIT"]


@dataclass(frozen=True)
class Memory:
    """Bytes of a device at their most."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Parameters that were gathered from other ranks, and gradients before they are split."""
    copies: int
    """16-bit copies of parameters that a device holds whole."""
    activations: int
    logits: int
    """Of as many tokens as a step has at once."""

    @property
    def bytes(self) -> int:
        """All of them."""
        return sum(getattr(self, one.name) for one in fields(self))

    def fit(self, gpu: Gpu) -> Fit:
        """Say whether a device has as much, with what estimates were off by."""
        has = capacity(gpu)
        if self.bytes * (1 + SPREAD) <= has:
            return "FITS"
        return "AT RISK" if self.bytes * (1 - SPREAD) <= has else "DOES NOT FIT"


def capacity(gpu: Gpu) -> int:
    """Return the bytes of a device that a training can have."""
    return int(CAPACITY * gpu.device_memory_bytes) - CONTEXT


def memory(work: ModelWork, machines: Machines, layout: ParallelLayout) -> Memory:
    """Return what the fullest device needs: of a pipeline, one of the first stage."""
    copies = layout.replicas(machines.devices)
    cut = layout.tensor * layout.pipeline
    spread = sum(one.weights for one in work.block.products if one.experts > 1) * work.layers
    mine = (work.parameters - spread + spread // layout.experts) // cut
    split = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}[layout.shards]

    def share(stage: int) -> int:
        return mine // copies if split >= stage else mine

    tokens = min(layout.microbatch * work.sequence, HEAD_TOKENS)
    copied = split < 3 and layout.parameter_bytes > layout.reduced_bytes
    here = 0 if layout.offload == "parameters" else 1
    moments = 0 if layout.offload != "none" else MOMENTS
    whole = layout.kept_whole and split == 3
    block = (work.block.weights + work.head.weights) // layout.tensor
    gathered = (layout.reduced_bytes + layout.gradient_bytes) * (mine if whole else block)
    return Memory(
        parameters=layout.parameter_bytes * share(3) * here,
        gradients=layout.parameter_bytes * share(2),
        optimizer=moments * layout.parameter_bytes * share(1),
        gathered=gathered if split == 3 and (copies > 1 or whole) else 0,
        copies=layout.reduced_bytes * mine if copied else 0,
        activations=_activations(work, layout),
        logits=LOGIT_BYTES * tokens * work.head.columns // layout.tensor,
    )


def _activations(work: ModelWork, layout: ParallelLayout) -> int:
    block, again = work.block, layout.recomputation
    kept = {True: block.kept_input, "selective": block.kept_products, False: block.kept}[again]
    layers = work.layers // layout.pipeline
    # The first stage has started as many microbatches as there are stages before one returns.
    started = layout.pipeline
    one = layers * kept * started + (block.kept if again else 0)
    return layout.microbatch * work.sequence * one // layout.tensor


def largest_microbatch(work: ModelWork, machines: Machines, layout: ParallelLayout) -> int:
    """Return the most sequences of one forward pass that surely fit, 0 where none does."""
    share = layout.global_batch // layout.replicas(machines.devices)
    found = 0
    for size in range(1, share + 1):
        if share % size == 0:
            if memory(work, machines, layout.with_microbatch(size)).fit(machines.gpu) != "FITS":
                break
            found = size
    return found
