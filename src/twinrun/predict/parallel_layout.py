"""How a training is spread over devices by a software, and the arithmetic that refuses it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.models.shape import ActivationCheckpointing, BlockWork, ModelWork, Positive

Recomputation = ActivationCheckpointing
Shards = Literal["none", "optimizer", "gradients", "parameters"]
Cut = Literal["tensor", "pipeline", "interleaved", "context", "experts", "sequence_parallel", "zero_bubble"]
Precision = Literal["bf16", "fp8", "mxfp8", "nvfp4", "mxfp4"]
# Bits of a gigabit a second, as bytes.
GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Machines:
    """Equal nodes with equal devices."""

    gpu: Gpu
    devices_per_node: int
    nodes: int = 1
    network: float | None = None
    """Bytes per second that a node sends, all its adapters together; None where nobody said."""
    price: float = 1.0
    """Price of a device for an hour; without a price device-hours are counted."""

    @classmethod
    def of(
        cls, gpu: Gpu, nodes: int, devices_per_node: int, network: float | None, price: float | None = None
    ) -> Machines:
        """Return machines; `network` is in Gbit/s of a node.

        Raises:
            InputError: a count or a speed that is none.
        """
        for place, count in (("--nodes", nodes), ("--devices-per-node", devices_per_node)):
            if count < 1:
                raise InputError("expected a count", place=place, found=count, allowed="1, 2, ...")
        if network is not None and network <= 0:
            words = "expected a speed in Gbit/s"
            raise InputError(words, place="--network", found=network, allowed="above 0")
        return cls(gpu, devices_per_node, nodes, network and network * GIGABIT, price or 1.0)

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def network_gbit_s(self) -> float | None:
        """Gbit/s that a node sends."""
        return self.network and self.network / GIGABIT


class Cuts(Frozen):
    """What a user says of a layout."""

    global_batch: Positive
    """Sequences of an optimizer step."""
    tensor: Positive = 1
    pipeline: Positive = 1
    interleaved: Positive = 1
    """Parts of the model that each stage of the pipeline has."""
    context: Positive = 1
    """Ranks that share the tokens of a sequence."""
    experts: Positive = 1
    """Ranks that the experts of a layer are spread over."""
    sequence_parallel: bool = False
    """Whether ranks of tensor parallelism split the tokens of norms and sums too."""
    zero_bubble: bool = False
    """Whether stages compute gradients of weights where they would wait."""
    shards: Shards = "none"
    """What data-parallel ranks split, each with what stands before it; `parameters` is ZeRO-3 and FSDP."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    recomputation: Recomputation = False
    precision: Precision = "bf16"
    """Arithmetic of the products of blocks; the rest is bf16, of which copies are kept."""
    kept_whole: bool = False
    """Whether gathered parameters and gradients stay between microbatches."""


class ParallelLayout(Cuts):
    """Who holds and computes what, and in which portions."""

    microbatch: Positive
    """Sequences of one forward pass."""
    parameter_bytes: int = 4
    """Bytes of a parameter and of its gradient between two passes; moments have its type."""
    masters: bool = False
    """Whether the optimizer has fp32 copies of 16-bit parameters, and its moments in fp32."""
    scores_kept: bool = False
    """Whether attention matrices are kept for the backward pass, as attention that is not fused does."""
    reduced_bytes: int = 2
    """Bytes of a number that is gathered, and of one in an activation."""
    gradient_bytes: int = 4
    """Bytes of a gradient as it is added up."""

    @classmethod
    def of(cls, cuts: Cuts, **more: Any) -> ParallelLayout:
        """Return what a user says, with other fields."""
        return cls(**cuts.model_dump(include=set(Cuts.model_fields)), **more)

    def replace(self, **changed: object) -> ParallelLayout:
        """Return it with other fields, which are not validated."""
        return self.model_copy(update=changed)

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

    def fault(self, work: ModelWork, machines: Machines) -> InputError | None:
        """Return what does not divide."""
        devices, copies = machines.devices, self.copies(machines.devices)
        replicas, parts = copies // self.context, self.pipeline * self.interleaved
        most = max(one.experts for one in work.block.products)
        # Ranks of tensor parallelism have experts of their own where there are more than replicas; Megatron
        # counts the embedding and the loss as layers.
        for part, limit, place, why in (
            (parts, work.layers + 2, "pipeline", "a part of a stage has a layer"),
            (
                self.experts,
                max(1, copies * self.tensor),
                "experts",
                "experts are spread over data-parallel ranks",
            ),
        ):
            if part > limit:
                return InputError(why, place=place, found=part, allowed=f"1 to {limit}")
        cut, shared = f"tensor {self.tensor}", f"{replicas} replicas x microbatch {self.microbatch}"
        context, count = f"context {self.context}", self.global_batch // max(1, replicas * self.microbatch)
        features = [(self.tensor, getattr(one, one.cut), cut, "features") for one in work.block.products]
        for part, whole, words, what in (
            (self.tensor * self.pipeline, devices, f"{cut} x pipeline {self.pipeline}", "devices"),
            (self.context, copies, context, "ranks of a stage"),
            (self.context, work.sequence, context, "tokens of a sequence"),
            *features,
            (replicas * self.microbatch, self.global_batch, shared, "sequences of the global batch"),
            # Stages take turns with their parts after as many microbatches as there are stages.
            (
                self.pipeline if self.interleaved > 1 else 1,
                count,
                f"pipeline {self.pipeline}",
                "microbatches",
            ),
            (self.experts, most, f"experts {self.experts}", "experts of the model"),
        ):
            if whole % part:
                return InputError(
                    f"{words} = {part} does not divide {whole} {what}",
                    place="global_batch" if words == shared else words.split()[0],
                    found=f"{whole} / {part} = {whole / part:.3g}",
                    allowed=f"a divisor of {whole}",
                )
        return None


class Software(Frozen):
    """A generation of a training framework."""

    id: str
    title: str
    cuts: frozenset[Cut]
    """What it cuts a model by."""
    shards: dict[Shards, bool]
    """What it splits over data-parallel ranks, and whether with stages or cut matrices too."""
    unfused: bool = False
    """Whether attention writes its matrices."""
    masters: bool = False
    """Whether it trains fp32 copies of 16-bit parameters."""
    summed_bytes: int | None = None
    """Bytes of a gradient while it is summed, where that is not its type."""
    selective_products: float = 0.0
    """Fraction of a block's products that selective recomputation computes again."""
    source: str

    def applied(self, layout: ParallelLayout) -> ParallelLayout:
        """Return a layout with what the software decides: types of states, and attention matrices."""
        mixed = {"parameter_bytes": 2, "masters": True} if self.masters else {}
        return layout.replace(scores_kept=self.unfused, **mixed)

    def refuses(self, layout: ParallelLayout) -> str | None:
        """Return what of a layout it does not have; None where it has all."""
        for name in get_args(Cut):
            if getattr(layout, name) > 1 - (getattr(layout, name) is True) and name not in self.cuts:
                return str(name)
        if layout.tensor * layout.pipeline > 1 and not self.shards.get(layout.shards, True):
            return f"shards={layout.shards} with tensor or pipeline"
        return None if layout.shards in self.shards else f"shards={layout.shards}"


def divisors(number: int, most: float = math.inf) -> list[int]:
    """Return the divisors of a number up to `most`, smallest first."""
    return [size for size in range(1, int(min(number, most)) + 1) if number % size == 0]
