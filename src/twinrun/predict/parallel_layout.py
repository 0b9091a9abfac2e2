"""How a training is spread over devices, and the arithmetic that refuses it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from twinrun.foundation.errors import InputError
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.models.shape import ActivationCheckpointing, BlockWork, ModelWork

Recomputation = ActivationCheckpointing
Shards = Literal["none", "optimizer", "gradients", "parameters"]
# Bits of a gigabit a second, as bytes.
GIGABIT = 1e9 / 8
Precision = Literal["bf16", "fp8", "mxfp8", "nvfp4", "mxfp4"]


@dataclass(frozen=True)
class Machines:
    """Equal nodes with equal devices."""

    gpu: Gpu
    devices_per_node: int
    nodes: int = 1
    network: float | None = None
    """Bytes per second that a node sends, all its adapters together; None where nobody said."""

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True)
class ParallelLayout:
    """Who holds and computes what, and in which portions."""

    global_batch: int
    """Sequences of an optimizer step."""
    microbatch: int
    """Sequences of one forward pass."""
    tensor: int = 1
    pipeline: int = 1
    interleaved: int = 1
    """Parts of the model that each stage of the pipeline has."""
    context: int = 1
    """Ranks that share the tokens of a sequence."""
    experts: int = 1
    """Ranks that the experts of a layer are spread over."""
    sequence_parallel: bool = False
    """Whether ranks of tensor parallelism split the tokens of norms and sums too."""
    zero_bubble: bool = False
    """Whether stages compute gradients of weights where they would wait."""
    shards: Shards = "none"
    """What data-parallel ranks split, each with what stands before it; `parameters` is ZeRO-3 and FSDP."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    recomputation: Recomputation = False
    parameter_bytes: int = 4
    """Bytes of a parameter and of its gradient between two passes; moments have its type."""
    masters: bool = False
    """Whether the optimizer has fp32 copies of 16-bit parameters, and its moments in fp32."""
    scores_kept: bool = False
    """Whether attention matrices are kept for the backward pass, as attention that is not fused does."""
    precision: Precision = "bf16"
    """Of the products of blocks; of a narrower one bf16 copies are kept."""
    reduced_bytes: int = 2
    """Bytes of a number that is gathered, and of one in an activation."""
    gradient_bytes: int = 4
    """Bytes of a gradient as it is added up."""
    kept_whole: bool = False
    """Whether gathered parameters and gradients stay between microbatches."""

    def with_microbatch(self, microbatch: int) -> ParallelLayout:
        """Return it with another microbatch."""
        return replace(self, microbatch=microbatch)

    def copies(self, devices: int) -> int:
        """Return the ranks that hold the same parameters, or parts of them."""
        return devices // (self.tensor * self.pipeline)

    def replicas(self, devices: int) -> int:
        """Return the ranks, or groups of them, that train on sequences of their own."""
        return self.copies(devices) // self.context

    def microbatches(self, devices: int) -> int:
        """Return the forward passes of a rank in a step."""
        return self.global_batch // (self.replicas(devices) * self.microbatch)

    def held_of_block(self, block: BlockWork) -> float:
        """Return the weights of a block that the ranks of tensor parallelism together compute with."""
        spread = sum(one.weights for one in block.products if one.experts > 1)
        return block.weights - spread + spread / self.experts

    def held(self, work: ModelWork) -> float:
        """Return the parameters that a rank of the fullest stage computes with."""
        ends = work.parameters - work.layers * work.block.weights
        if self.pipeline > 1:
            # The first stage has the embedding and the last the head, of which a tied one is a copy.
            ends = max(work.embedding, work.head.weights)
        blocks = self.stage_layers(work) * self.held_of_block(work.block)
        return (blocks - work.absent / self.experts / self.pipeline + ends) / self.tensor

    def stage_layers(self, work: ModelWork) -> int:
        """Return the blocks of the fullest stage; others are shorter where parts do not divide them."""
        return self.interleaved * math.ceil(work.layers / (self.pipeline * self.interleaved))

    def check(self, work: ModelWork, machines: Machines) -> None:
        """Hold a layout against the arithmetic.

        Raises:
            InputError: something does not divide.
        """
        counts = ("tensor", "pipeline", "interleaved", "context", "experts", "microbatch", "global_batch")
        for name in counts:
            if getattr(self, name) < 1:
                raise InputError(
                    "expected a count", place=name, found=getattr(self, name), allowed="1, 2, ..."
                )
        if machines.network is not None and machines.network <= 0:
            raise InputError("expected a speed", place="network", found=machines.network, allowed="above 0")
        devices, cut = machines.devices, f"tensor {self.tensor} x pipeline {self.pipeline}"
        _divides(self.tensor * self.pipeline, devices, "tensor", cut, "devices")
        copies, replicas = self.copies(devices), self.replicas(devices)
        context, most = f"context {self.context}", max(one.experts for one in work.block.products)
        _divides(self.context, copies, "context", context, "ranks of a stage")
        _divides(self.context, work.sequence, "context", context, "tokens of a sequence")
        # Megatron counts the embedding and the loss as layers.
        parts = self.pipeline * self.interleaved
        _within(parts, work.layers + 2, "pipeline", "a part of a stage has a layer")
        for one in work.block.products:
            features = getattr(one, one.cut)
            _divides(self.tensor, features, "tensor", f"tensor {self.tensor}", "features")
        shared, what = f"{replicas} replicas x microbatch {self.microbatch}", "sequences of the global batch"
        _divides(replicas * self.microbatch, self.global_batch, "global_batch", shared, what)
        if self.interleaved > 1:
            # Stages take turns with their parts after as many microbatches as there are stages.
            count = self.microbatches(devices)
            _divides(self.pipeline, count, "interleaved", f"pipeline {self.pipeline}", "microbatches")
        # Ranks of tensor parallelism have experts of their own where there are more than replicas.
        ranks = copies * self.tensor
        _within(self.experts, ranks, "experts", "experts are spread over the data-parallel ranks")
        _divides(self.experts, most, "experts", f"{self.experts} ranks", "experts of the model")


def _within(part: int, most: int, place: str, words: str) -> None:
    if part > most:
        raise InputError(words, place=place, found=part, allowed=f"1 to {most}")


def _divides(part: int, whole: int, place: str, words: str, what: str) -> None:
    if whole % part:
        raise InputError(
            f"{words} = {part} does not divide {whole} {what}",
            place=place,
            found=f"{whole} / {part} = {whole / part:.3g}",
            allowed=f"a divisor of {whole}",
        )
