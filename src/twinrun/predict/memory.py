"""The memory that a device needs, part by part, and whether it has it."""

from __future__ import annotations

from itertools import takewhile
from typing import Literal, NamedTuple

from twinrun.foundation.text import GIB
from twinrun.manifests.vendor import Gpu
from twinrun.predict.parallel_layout import Machines, ParallelLayout, divisors
from twinrun.protocol.models.shape import HEAD_TOKENS, ModelWork

# Devices have up to 7 % more than the data sheet's decimal gigabytes; the runtime's context takes of it.
CAPACITY, CONTEXT = 1.06, GIB // 2
# Mean error over the peaks of rows.csv: 1 % with attention, 10 % of torchtitan; Mamba is 19 % too high.
SPREAD = 0.07
# Moments of Adam, of the parameter's type; bytes of both where an fp32 copy of the parameter is beside them.
MOMENTS, MASTER_BYTES = 2, 12
# Blocks that are gathered ahead of their use, with their gradients.
GATHERED_BLOCKS = 2
# DDP reduces gradients in buckets of their own.
BUCKET_BYTES = 4
# DeepSpeed's bucket of gradients on their way to the host, in 16 bits and fp32, one filling and one leaving.
OFFLOAD_BUCKET, OFFLOAD_BYTES = 500_000_000, 12
# Of a logit where all are computed at once: 16-bit, and its gradient.
SINGLE_CHUNK_BYTES = 4
# Of each element of an attention matrix: softmax, dropout's mask and its result. Of the stream of each token
# (both: Korthikanti et al. 2022, arXiv:2205.05198, equations 1 and 3).
SCORE_BYTES, STREAM_BYTES = 5, 10
Fit = Literal["FITS", "AT RISK", "DOES NOT FIT"]


class Memory(NamedTuple):
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
        return sum(self)

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
    """Return what the fullest device needs: of a pipeline, one of the stage with most parameters."""
    # A record may claim fewer devices than its layout needs.
    copies, mine = max(1, layout.copies(devices)), int(layout.held(work))
    # Ranks that hold the same experts are fewer by as many as the experts are spread over.
    shared = int(layout.replace(experts=1).held(work)) // copies
    split = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}[layout.shards]

    def share(stage: int) -> int:
        return shared if split >= stage else mine

    cast = split < 3 and layout.parameter_bytes > layout.reduced_bytes
    buckets = split == 0 and copies > 1 and not layout.masters
    # Some blocks come from other ranks, and all of them where they stay.
    near = GATHERED_BLOCKS * (work.parameters // work.layers) // layout.tensor + mine * layout.kept_whole
    here = 0 if layout.offload == "parameters" else 1
    state = MASTER_BYTES if layout.masters else MOMENTS * layout.parameter_bytes
    moments = 0 if layout.offload != "none" else state
    gradients = (layout.gradient_bytes if layout.masters else layout.parameter_bytes) * share(2)
    if layout.offload != "none":
        # They leave for the host as they are made.
        gradients = OFFLOAD_BYTES * min(mine, OFFLOAD_BUCKET)
    return Memory(
        parameters=layout.parameter_bytes * share(3) * here,
        gradients=gradients,
        optimizer=moments * share(1),
        gathered=(layout.reduced_bytes + layout.gradient_bytes) * near if split == 3 else 0,
        copies=(layout.reduced_bytes * cast + BUCKET_BYTES * buckets) * mine,
        activations=_activations(work, layout, layout.microbatches(devices)),
        logits=_logits(work, layout),
    )


def _logits(work: ModelWork, layout: ParallelLayout) -> int:
    """Return the bytes of the logits that exist at once; a single chunk keeps its gradient alone."""
    tokens = layout.microbatch * work.sequence // layout.context
    each = work.logit_bytes if tokens > HEAD_TOKENS else min(work.logit_bytes, SINGLE_CHUNK_BYTES)
    size = each * layout.reduced_bytes * min(tokens, HEAD_TOKENS) * work.head.columns
    return size // (2 * layout.tensor)


def _activations(work: ModelWork, layout: ParallelLayout, microbatches: int) -> int:
    # Families count activations of 16 bits.
    block, again = work.block, layout.recomputation
    scores = SCORE_BYTES * block.scores if layout.scores_kept else 0
    # Every rank of tensor parallelism has the stream of each token, its norm, and what enters products.
    stream = 0 if layout.sequence_parallel else min(STREAM_BYTES * block.width, block.kept)
    whole = stream + (block.kept + scores - stream) / layout.tensor
    # Where attention is not fused, selective recomputation is of its matrices alone.
    selective = whole - scores / layout.tensor
    if not layout.scores_kept:
        selective = min(stream, block.kept_products / 2)
        selective += (block.kept_products - selective) / layout.tensor
    spread = layout.tensor if layout.sequence_parallel else 1
    # An upper bound for every other product: nobody counted which sizes these have.
    part = selective if again else whole
    kept = block.kept_input / spread if again is True else part
    layers = layout.stage_layers(work)
    # The first stage has started as many microbatches as there are stages before one returns, if there are as
    # many; of interleaved parts some more (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3).
    started: float = min(layout.pipeline, max(1, microbatches))
    if layout.interleaved > 1:
        started += (layout.pipeline - 1) / layout.interleaved
    # While it is computed again, a block has what it keeps otherwise.
    second = whole - selective if again not in (True, False) and layout.scores_kept else whole
    one = layers * kept * started + (second if again else 0)
    tokens = layout.microbatch * work.sequence // layout.context
    return int(tokens * one * layout.reduced_bytes / 2)


def largest_microbatch(work: ModelWork, machines: Machines, layout: ParallelLayout) -> int:
    """Return the most sequences of one forward pass that surely fit, 0 where none does."""
    devices = machines.devices

    def fits(size: int) -> bool:
        one = layout.replace(microbatch=size)
        return memory(work, one, devices=devices).fit(machines.gpu) == "FITS"

    return max(takewhile(fits, divisors(layout.global_batch // layout.replicas(devices))), default=0)
