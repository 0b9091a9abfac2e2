"""The time of an optimizer step, part by part: a model to be read from top to bottom.

A block takes what the device computes and what its products wait for, or what the host can start, whichever
is longer, and somewhat more where both are as long; parameters that are gathered meanwhile hide behind it but
for a share. A step is its blocks and its head, for every microbatch, with the empty slots of a pipeline, then
the sum of gradients and the optimizer.

Ranks stand as Megatron places them: those of tensor parallelism next to each other, then those that share a
sequence, then replicas, then stages. A group whose ranks stand apart crosses nodes sooner, and the groups of
a node share its network.

What hardware and software reach is named in `IDEAL`; everything else here is counted, or has its source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from twinrun.foundation.manifest import Frozen, load_rows
from twinrun.manifests.vendor import Gpu
from twinrun.predict.parallel_layout import Machines, ParallelLayout, Precision, Software
from twinrun.protocol.models.shape import ModelWork, Product

# Every rate, as no hardware and no software passes it; calibration.toml says what each is.
IDEAL: dict[str, float] = dict.fromkeys(("again", "bubble", "pace", "time"), 1.0)
IDEAL |= dict.fromkeys(
    ("products", "attention", "links", "network", "optimizer", "scan", "memory", "logits"), 1e9
) | dict.fromkeys(("host", "hop", "exposed"), 0.0)
# Bits multiply so many times as fast as bf16; of four bits a GPU's row says it.
PEAKS: Mapping[Precision, float] = {"bf16": 1, "fp8": 2, "mxfp8": 2}
# Features at which a product reaches half of its rate, on either side, and FLOP that one takes the time of
# besides its own: fitted with all rows of GPT and MPT, 125M to 1T.
FEATURES, PRODUCT_WORK = 183, 3.3e10
# Elements that eager kernels read and write in a forward pass, for each feature of the residual stream (two
# norms, two sums, three biases) and for each of the hidden layer (bias and activation).
STREAM_PASSES, HIDDEN_PASSES = 14, 3
# The backward pass reads what the forward one wrote, and writes gradients.
BACKWARD_PASSES = 1.5
# Bytes moved for a logit, forward and backward, for an attention matrix's element forward, for a parameter.
LOGIT_MOVED, SCORE_MOVED, OPTIMIZER_MOVED = 25, 7, 30
# Share of a block's products that every other one is: nobody counted which sizes these have.
ALTERNATE_PRODUCTS = 0.5
# Fused attention computes its weights again in the backward pass: five products for two.
ATTENTION_BACKWARD = 2.5
# Positions behind a token are skipped by fused kernels.
CAUSAL = 0.5
# Matrix units take rows of 16 bytes; a head of another size is multiplied by vector units where attention is
# not fused, at a sixteenth of the rate on an A100 (19.5 of 312 TFLOP/s), and padded where it is.
ROW, VECTOR_UNITS, PADDED = 8, 16, 64
# Sequences times heads of a rank that Megatron's fused softmax takes are a multiple of this; what the host
# needs besides where they are not, and for each further rank of tensor parallelism, over a block's time.
SOFTMAX_ROWS, SOFTMAX_HOST, TENSOR_HOST = 4, 0.33, 0.03
# Blocks that the host could start while a step begins and ends.
STEP_BLOCKS = 5
# A stage of a zero-bubble schedule fills two thirds of its empty slots with gradients of weights (ZB-H1, Qi
# et al. 2024, arXiv:2401.10241, section 2.1).
ZERO_BUBBLE = 1 / 3
# The fullest expert has so many times the tokens of the mean one: stated, not fitted.
IMBALANCE = 1.2
# Hops that a collective takes at least.
LEAST_HOPS = 6
ACTIVATION_BYTES = 2


class StepTime(NamedTuple):
    """Seconds of an optimizer step by what takes them; parts that hide behind others are left out."""

    products: float
    attention: float
    memory: float
    """Norms, activations and sums, by the bytes they move."""
    head: float
    host: float
    """What the device waits for the host."""
    collectives: float
    """What the device waits for links and network."""
    bubble: float
    """What stages wait for each other."""
    optimizer: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self)


class KernelTime(Frozen):
    """One line of kernel_times.csv: a kernel of this project on a GPU that few have, by its compiled code."""

    arch: str
    gpu: str
    units: int
    """Compute units of a device."""
    kernel: str
    shape: str
    """Batch, heads or channels, length, and features of a head, states or taps: 2x5376x4096x16."""
    causal: bool
    ms: float
    low: float
    """Lower end of the 90 % interval, in ms."""
    high: float
    bound: str
    """What takes the time."""


@cache
def kernel_times() -> tuple[KernelTime, ...]:
    """Return the table."""
    return load_rows(Path(__file__).with_name("kernel_times.csv"), KernelTime)


@cache
def scan_of(gpu: Gpu) -> tuple[float, float] | None:
    """Return elements a second of a scan's forward pass, and how many of these its backward pass takes.

    Compiled code for the architecture predicts them; it is None where nobody compiled any.
    """
    rows = {one.kernel: one for one in kernel_times() if one.arch == gpu.arch}
    if "scan-forward" not in rows:
        return None
    forward, backward = rows["scan-forward"], rows["scan-backward"]
    units = (gpu.compute_units or forward.units) / forward.units
    elements = math.prod(map(int, forward.shape.split("x")))
    return elements / (forward.ms / 1e3) * units, backward.ms / forward.ms


def below_one(share: float) -> float:
    """Return a share that is about as large while it is small, and never more than 1."""
    return share / math.sqrt(math.hypot(1, share**2))


def peak(gpu: Gpu, precision: Precision) -> float:
    """Return the dense FLOP/s of a device in a precision, 0 where its matrix units do not have it."""
    if precision in PEAKS:
        return gpu.device_peak_flops * PEAKS[precision] * (gpu.fp8 or precision == "bf16")
    return gpu.device_peak_flops * (gpu.fp4_over_bf16 or 0.0)


@dataclass(frozen=True)
class _Device:
    """What a device reaches, in FLOP and bytes per second."""

    narrow: float
    wide: float
    attention: float
    memory: float

    def product(self, one: Product, *, tokens: float, tensor: int, narrow: bool, groups: float = 1) -> float:
        """Return the seconds of a product over `tokens`: its FLOP, or the bytes that it reads and writes."""
        columns = one.columns / (tensor if one.cut == "columns" else 1)
        inner = one.inner / (tensor if one.cut == "inner" else 1)
        lost = 1 + FEATURES * (1 / columns + 1 / inner)
        flops = 2 * tokens * columns * inner * lost + PRODUCT_WORK
        moved = ACTIVATION_BYTES * (tokens * (columns + inner) + groups * columns * inner)
        return max(flops / (self.narrow if narrow else self.wide), moved / self.memory)


@dataclass(frozen=True)
class Step:
    """A step of a training; `rates` has those of `IDEAL`."""

    work: ModelWork
    machines: Machines
    layout: ParallelLayout
    software: Software
    rates: Mapping[str, float]

    @property
    def tokens(self) -> float:
        """Tokens that a rank computes of a microbatch."""
        return self.layout.microbatch * self.work.sequence / self.layout.context

    @cached_property
    def device(self) -> _Device:
        """What a device reaches; no part of it is faster than the data sheet, whatever the pace."""
        gpu, rates = self.machines.gpu, self.rates
        products, attention = (below_one(rates[one] / rates["pace"]) for one in ("products", "attention"))
        wide = gpu.device_peak_flops * products
        return _Device(
            narrow=max(peak(gpu, self.layout.precision) * products, wide),
            wide=wide,
            attention=gpu.device_peak_flops * attention,
            memory=gpu.device_bandwidth_bytes_s * min(1.0, 1 / rates["pace"]),
        )

    @property
    def links(self) -> float:
        """Bytes a second of a device to the others of its node."""
        return (self.machines.gpu.link_gb_s or 0.0) * 1e9 * below_one(self.rates["links"])

    @property
    def network(self) -> float:
        """Bytes a second of a node."""
        return (self.machines.network or 0.0) * below_one(self.rates["network"])

    def time(self) -> StepTime:
        """Return the whole step."""
        work, layout, rates, device = self.work, self.layout, self.rates, self.device
        devices, tokens, layers = self.machines.devices, self.tokens, layout.stage_layers(work)
        count = layout.microbatches(devices)
        busy = {name: forward * (1 + back) for name, (forward, back) in self.block().items()}
        computing, between = sum(busy.values()), self.between_products()
        started = math.hypot((computing + between) ** 2, self.host() ** 2) ** 0.5
        gathered, root, split = 0.0, 0.0, layout.shards == "parameters" and not layout.kept_whole
        if split:
            # A block's parameters come twice, and its gradients go once. What is in no block is gathered
            # before the first one and summed after the last, when nothing hides it.
            each, held = layout.reduced_bytes / layout.tensor, layout.held_of_block(work.block)
            ends = work.parameters - work.layers * work.block.weights + work.absent
            gathered = 3 * self.collective(each * held, "copies")
            root = 2 * self.collective(each * ends, "copies")
        waits = max(0.0, gathered - started) + min(1.0, rates["exposed"]) * min(gathered, started)
        head = 3 * device.product(work.head, tokens=tokens, tensor=layout.tensor, narrow=False)
        head += LOGIT_MOVED * tokens * work.head.columns / layout.tensor / (rates["logits"] * device.memory)
        # The last stage has a block less for its head where parts do not divide the blocks.
        uneven = layers * layout.pipeline > work.layers
        slot, sent = layers * (started + waits), layout.interleaved * self.between_stages()
        empty = (layout.pipeline - 1) * (ZERO_BUBBLE if layout.zero_bubble else 1.0) * rates["bubble"]
        moved = OPTIMIZER_MOVED * layout.held(work)
        moved /= layout.copies(devices) if layout.shards != "none" else 1
        gradients = 0.0 if split else self.gradients(backward=layers * started * 2 / 3, count=count)
        return StepTime(
            **{name: count * layers * seconds for name, seconds in busy.items()},
            head=count * (max(0.0, head - started) if uneven else head),
            host=count * layers * (started - computing - between) + STEP_BLOCKS * rates["host"],
            collectives=count * (layers * (between + waits) + sent + root) + gradients,
            bubble=empty * (slot + sent) / layout.interleaved,
            optimizer=moved / (below_one(rates["optimizer"]) * device.memory),
        )

    def block(self) -> dict[str, tuple[float, float]]:
        """Return by part the seconds of a block's forward pass, and how many of them come after it."""
        layout, device, tokens, software = self.layout, self.device, self.tokens, self.software
        block, tensor, narrow = self.work.block, layout.tensor, layout.precision != "bf16"
        products = 0.0
        for one in block.products:
            own, met = one.experts / layout.experts, IMBALANCE if one.experts > 1 else 1.0
            many = tokens * one.active * met
            products += device.product(one, tokens=many, tensor=tensor, narrow=narrow, groups=own)
        attention, back = 0.0, ATTENTION_BACKWARD
        if block.scanned and (scan := scan_of(self.machines.gpu)):
            elements, back = scan
            attention = tokens * block.scanned / (self.rates["scan"] * elements) / tensor
        elif block.attention_flops and software.unfused:
            slow, back = VECTOR_UNITS if block.head % ROW else 1, 2.0
            scores = SCORE_MOVED * block.scores / device.memory / self.rates["attention"]
            attention = tokens / tensor * (block.attention_flops * slow / device.wide + scores)
        elif block.attention_flops:
            padded = math.ceil(block.head / PADDED) * PADDED / block.head if block.head else 1.0
            flops = block.attention_flops * CAUSAL * padded
            attention = tokens / tensor * flops / min(device.attention, device.wide)
        # Norms and sums are computed by every rank, unless their tokens are split too.
        stream = STREAM_PASSES * block.width / (tensor if layout.sequence_parallel else 1)
        moved = ACTIVATION_BYTES * (stream + HIDDEN_PASSES * block.hidden / tensor) * tokens
        if narrow:
            # The input of a product is read once more and written in a byte, in both passes.
            moved += 3 * tokens * sum(one.inner * one.active for one in block.products) / tensor
        how = layout.recomputation
        # A backward pass computes all again, or keeps attention and the results of products, or some of
        # these; where attention is not fused it is the attention matrices that are computed again.
        again = (self.rates["again"],) * 3 if how else (0.0, 0.0, 0.0)
        if not isinstance(how, bool):
            every_other = ALTERNATE_PRODUCTS if how == "selective-alternate" else 0.0
            again = (software.selective_products or every_other, 0.0, 1.0)
            again = (0.0, 1.0, 0.0) if software.unfused else again
        return {
            "products": (products, 2.0 + again[0]),
            "attention": (attention, back + again[1]),
            "memory": (moved / (self.rates["memory"] * device.memory), BACKWARD_PASSES + again[2]),
        }

    def host(self) -> float:
        """Return the seconds that the host needs to start a block, forward and backward."""
        work, layout = self.work, self.layout
        blocks = 1 + TENSOR_HOST * (layout.tensor - 1)
        if self.software.unfused and work.block.scores:
            rows = layout.microbatch * (work.block.scores // work.sequence) // layout.tensor
            blocks += SOFTMAX_HOST if rows % SOFTMAX_ROWS else 0.0
        return self.rates["host"] * blocks * (4.0 if layout.recomputation is True else 3.0)

    def between_products(self) -> float:
        """Return the seconds of a block's collectives that the next product waits for."""
        block, layout, tokens = self.work.block, self.layout, self.tokens
        again = layout.recomputation is True
        size = layout.reduced_bytes * tokens * block.width
        # Two sums of activations forward, two backward; each is a scatter and a gather.
        sums = 2 * self.collective(size, "tensor")
        # Tokens go to their experts and return, forward and backward.
        active = max(one.active for one in block.products)
        held = size / (layout.tensor if layout.sequence_parallel else 1)
        experts = self.experts(held * IMBALANCE, active)
        # Keys and values come forward and backward, and their gradients go.
        keys = layout.reduced_bytes * tokens * layout.context * block.keys / layout.tensor
        shared = (3 + again) * self.rates["exposed"] * self.collective(keys, "context")
        return (4 + 2 * again) * (sums + experts) + shared

    def between_stages(self) -> float:
        """Return the seconds in which a stage sends its activations to the next, each rank of it a part."""
        machines, tensor = self.machines, self.layout.tensor
        if self.layout.pipeline == 1:
            return 0.0
        size = 2 * ACTIVATION_BYTES * self.tokens * self.work.block.width
        pipelines = max(1.0, machines.devices_per_node / tensor)
        time = size * pipelines / self.network if machines.nodes > 1 else size / self.links
        return time + 2 * LEAST_HOPS * self.rates["hop"]

    def gradients(self, *, backward: float, count: int) -> float:
        """Return what backward passes leave of the sum of gradients over copies."""
        layout = self.layout
        # They are scattered once a step, or after every pass where they are split, and gathered once: what
        # backward passes hide of the one, forward passes hide of the other.
        size = (self.software.summed_bytes or layout.gradient_bytes) * layout.held(self.work)
        once, scattered = self.collective(size, "copies"), count if layout.shards == "gradients" else 1
        hidden = scattered * min(once, backward) + min(once, backward / 2)
        return (scattered + 1) * once - (1 - min(1.0, self.rates["exposed"])) * hidden

    def collective(self, size: float, group: Literal["tensor", "context", "copies"]) -> float:
        """Return the seconds in which ranks gather, or scatter, `size` bytes.

        Those of tensor parallelism, those that share a sequence, or those that hold the same parameters.
        """
        machines, layout = self.machines, self.layout
        copies, stride = layout.copies(machines.devices), 1 if group == "tensor" else layout.tensor
        ranks = {"tensor": layout.tensor, "context": layout.context, "copies": copies}[group]
        if ranks == 1 or not size:
            return 0.0
        inside = max(1, min(ranks, machines.devices_per_node // stride))
        # Every group of the node sends its own.
        groups = min(machines.devices_per_node / inside, machines.devices / ranks)
        return self.exchange(inside, ranks / inside, links=size, between=groups * size)

    def experts(self, size: float, active: int) -> float:
        """Return the seconds in which each rank sends `size` bytes of tokens to each of `active` experts."""
        ranks, node = self.layout.experts, self.machines.devices_per_node
        if ranks == 1:
            return 0.0
        inside = max(1, min(ranks, node // self.layout.tensor))
        nodes = ranks / inside
        # A node gets a token once, however many of its experts want it.
        reached = nodes * (1 - (1 - 1 / nodes) ** active)
        return self.exchange(inside, nodes, links=active * size, between=node * size * reached)

    def exchange(self, inside: int, nodes: float, *, links: float, between: float) -> float:
        """Return the seconds of bytes of a rank over links, or of a node over the network, and of hops.

        A group has `inside` ranks in each of its `nodes`; hops between nodes take twice as long.
        """
        near = links * (inside - 1) / inside / self.links if inside > 1 else 0.0
        far = between * (nodes - 1) / nodes / self.network if nodes > 1 else 0.0
        return max(near, far) + self.rates["hop"] * max(LEAST_HOPS, inside - 1 + 2 * (nodes - 1))
