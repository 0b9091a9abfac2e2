"""The memory that a device needs, part by part, and whether it has it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from twinrun.foundation.text import GIB
from twinrun.manifests.vendor import Gpu
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.protocol.models.shape import HEAD_TOKENS
from twinrun.protocol.work import ModelWork

# Devices have up to 7 % more than the data sheet's decimal gigabytes; the runtime's context takes of it.
CAPACITY, CONTEXT = 1.06, GIB // 2
# Estimates are 0.96 to 1.04 times the recorded peaks above 32 GiB, those of DeepSpeed 0.93 to 1.01:
# tests/workloads/test_estimates.py has all of them.
SPREAD = 0.07
# Moments of Adam, of the parameter's type; bytes of both where an fp32 copy of the parameter is beside them.
MOMENTS, MASTER_BYTES = 2, 12
# Blocks that are gathered ahead of their use, with their gradients.
GATHERED_BLOCKS = 2
# DDP reduces gradients in buckets of their own.
BUCKET_BYTES = 4
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
    """16-bit copies of parameters that a device holds whole, and buckets of their gradients."""
    activations: int
    logits: int
    """Bytes of the logits of all tokens that a step has at once."""

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


def memory(work: ModelWork, layout: ParallelLayout, *, devices: int) -> Memory:
    """Return what the fullest device needs: of a pipeline, one of the first stage."""
    # A record may claim fewer devices than its layout needs.
    copies = max(1, layout.replicas(devices))
    cut = layout.tensor * layout.pipeline
    spread = sum(one.weights for one in work.block.products if one.experts > 1) * work.layers
    mine = (work.parameters - spread + spread // layout.experts) // cut
    split = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}[layout.shards]

    def share(stage: int) -> int:
        return mine // copies if split >= stage else mine

    tokens, width = min(layout.microbatch * work.sequence, HEAD_TOKENS), layout.reduced_bytes
    cast = split < 3 and layout.parameter_bytes > layout.reduced_bytes
    buckets = split == 0 and copies > 1
    here = 0 if layout.offload == "parameters" else 1
    state = MASTER_BYTES if layout.masters else MOMENTS * layout.parameter_bytes
    moments = 0 if layout.offload != "none" else state
    return Memory(
        parameters=layout.parameter_bytes * share(3) * here,
        gradients=layout.parameter_bytes * share(2),
        optimizer=moments * share(1),
        gathered=_gathered(work, layout, mine) if split == 3 else 0,
        copies=(layout.reduced_bytes * cast + BUCKET_BYTES * buckets) * mine,
        activations=_activations(work, layout),
        logits=work.logit_bytes * width * tokens * work.head.columns // (2 * layout.tensor),
    )


def _gathered(work: ModelWork, layout: ParallelLayout, mine: int) -> int:
    """Return the bytes of what comes from other ranks: some blocks, and all of them where they stay."""
    some = GATHERED_BLOCKS * (work.parameters // work.layers) // layout.tensor
    return (layout.reduced_bytes + layout.gradient_bytes) * (some + (mine if layout.kept_whole else 0))


def _activations(work: ModelWork, layout: ParallelLayout) -> int:
    # Families count activations of 16 bits.
    block, again = work.block, layout.recomputation
    kept = {True: block.kept_input, "selective": block.kept_products, False: block.kept}[again]
    layers = work.layers / layout.pipeline
    # The first stage has started as many microbatches as there are stages before one returns; of interleaved
    # parts some more (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3).
    started: float = layout.pipeline
    if layout.interleaved > 1:
        started += (layout.pipeline - 1) / layout.interleaved
    one = layers * kept * started + (block.kept if again else 0)
    return int(layout.microbatch * work.sequence * one * layout.reduced_bytes / 2) // layout.tensor


def largest_microbatch(work: ModelWork, machines: Machines, layout: ParallelLayout) -> int:
    """Return the most sequences of one forward pass that surely fit, 0 where none does."""
    devices = machines.devices
    share = layout.global_batch // layout.replicas(devices)
    found = 0
    for size in range(1, share + 1):
        if share % size == 0:
            if memory(work, layout.with_microbatch(size), devices=devices).fit(machines.gpu) != "FITS":
                break
            found = size
    return found
