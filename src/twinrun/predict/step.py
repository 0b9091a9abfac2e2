"""The time of an optimizer step, part by part: a model to be read from top to bottom.

A block takes the longer of what the device computes, what the links carry and what the host can start, and a
share of the shorter ones. A step is its blocks and its head, for every microbatch, with the empty slots of a
pipeline, then the sum of gradients and the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from twinrun.predict.calibration import Calibration, Software
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.protocol.work import BlockWork, ModelWork, Product

# Elements that eager kernels read and write in a forward pass, for each feature of the residual stream (two
# norms, two sums, three biases) and for each of the hidden layer (bias and activation).
STREAM_PASSES, HIDDEN_PASSES = 14, 3
# The backward pass reads what the forward one wrote, and writes gradients.
BACKWARD_PASSES = 1.5
# Fused attention computes its weights again in the backward pass: five products for two.
ATTENTION_BACKWARD = 2.5
# Positions behind a token are skipped by fused kernels.
CAUSAL = 0.5
# As long as so many forward passes takes the backward pass of the scan: 0.393 and 1.321 ms on an H100.
SCAN_BACKWARD = 3.4


@dataclass(frozen=True)
class StepTime:
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
        return sum((getattr(self, one.name) for one in fields(self)), 0.0)


@dataclass(frozen=True)
class _Rates:
    """What a device reaches with a software, in FLOP and bytes per second."""

    peak: float
    features: float
    tokens: float
    attention: float
    memory: float
    scan: float
    links: float
    network: float

    def product(self, one: Product, *, tokens: int, tensor: int) -> float:
        """Return the seconds of one product over `tokens`."""
        columns = one.columns / (tensor if one.cut == "columns" else 1)
        inner = one.inner / (tensor if one.cut == "inner" else 1)
        small = 1 + self.features * (1 / columns + 1 / inner) + self.tokens / tokens
        return 2 * tokens * columns * inner * small / self.peak


def step_time(
    work: ModelWork,
    machines: Machines,
    layout: ParallelLayout,
    *,
    software: Software,
    calibration: Calibration,
) -> StepTime:
    """Return the time of an optimizer step, part by part."""
    rates = _rates(machines, software, calibration)
    tokens, devices = layout.microbatch * work.sequence, machines.devices
    count = layout.microbatches(devices)
    layers = work.layers / layout.pipeline
    compute = _block(work.block, rates, software, tokens=tokens, tensor=layout.tensor)
    passes = 4.0 if layout.recomputation is True else 3.0
    again = software.recomputed if layout.recomputation is True else 0.0
    # Selective recomputation keeps the results of products and of attention.
    added = dict.fromkeys(compute, again) | ({"memory": 1.0} if layout.recomputation == "selective" else {})
    busy = {name: forward * (1 + back + added[name]) for name, (forward, back) in compute.items()}
    computing = sum(busy.values())
    host = passes * (software.host + software.tensor_host * (layout.tensor - 1))
    between = _between_products(work, machines, layout, rates, software, tokens=tokens)
    carried = _carried(work, machines, layout, rates, software)
    hidden = _waits(computing + between, host, carried, software.exposed)
    head = _head(work, rates, software, tokens=tokens, tensor=layout.tensor)
    slot = layers * (computing + between + hidden.host + hidden.collectives)
    bubble = 0.0
    # One stage sends nothing, on one device there may be no link to send over.
    if stages := layout.pipeline - 1:
        sent = _sent(work, machines, rates, software, tokens=tokens)
        bubble = stages * (slot / layout.interleaved + sent)
    reduced = _gradients(work, machines, layout, rates, software, backward=layers * computing * 2 / 3)
    optimizer = _optimizer(work, layout, rates, software, devices=devices) + software.step
    return StepTime(
        products=count * layers * busy["products"],
        attention=count * layers * busy["attention"],
        memory=count * layers * busy["memory"],
        head=count * head,
        host=count * layers * hidden.host,
        collectives=count * layers * (between + hidden.collectives) + reduced,
        bubble=bubble,
        optimizer=optimizer,
    )


def _rates(machines: Machines, software: Software, calibration: Calibration) -> _Rates:
    gpu = machines.gpu
    attention = calibration.rate("attention", software, gpu.id) if software.attention else 0.0
    return _Rates(
        peak=gpu.device_peak_flops * calibration.rate("products", software, gpu.id),
        features=calibration.products.features,
        tokens=calibration.products.tokens,
        attention=gpu.device_bandwidth_bytes_s * attention,
        memory=gpu.device_bandwidth_bytes_s * calibration.memory,
        scan=software.scan.get(gpu.id, 0.0),
        links=(gpu.link_gb_s or 0.0) * 1e9 * software.links,
        network=(machines.network or 0.0) * software.network,
    )


def _block(
    block: BlockWork, rates: _Rates, software: Software, *, tokens: int, tensor: int
) -> dict[str, tuple[float, float]]:
    """Return by part the seconds of a block's forward pass, and how many of them the backward pass takes."""
    products = sum(rates.product(one, tokens=tokens, tensor=tensor) for one in block.products)
    if software.unfused:
        scores = software.unfused * block.scores / rates.memory
        attention = tokens / tensor * (block.attention_flops / rates.peak + scores), 2.0
    else:
        attention = tokens / tensor * block.attention_flops * CAUSAL / rates.attention, ATTENTION_BACKWARD
    if block.scanned:
        attention = tokens * block.scanned / rates.scan / tensor, SCAN_BACKWARD
    elements = STREAM_PASSES * block.width + HIDDEN_PASSES * block.hidden / tensor
    moved = 2 * software.elements * elements * tokens / rates.memory
    return {"products": (products, 2.0), "attention": attention, "memory": (moved, BACKWARD_PASSES)}


@dataclass(frozen=True)
class _Waits:
    host: float
    collectives: float


def _waits(computing: float, host: float, carried: float, exposed: float) -> _Waits:
    """Return what a block waits beyond its computing, which hides the host wholly and links in part."""
    started = max(computing, host)
    waits = max(0.0, carried - started) + exposed * min(carried, started)
    return _Waits(host=started - computing, collectives=waits)


def _head(work: ModelWork, rates: _Rates, software: Software, *, tokens: int, tensor: int) -> float:
    """Return the seconds of logits and loss, forward and backward."""
    logits = software.logits * tokens * work.head.columns / tensor / rates.memory
    return 3 * rates.product(work.head, tokens=tokens, tensor=tensor) + logits


def _collective(size: float, ranks: int, machines: Machines, rates: _Rates, software: Software) -> float:
    """Return the seconds in which `ranks` gather, or scatter, `size` bytes; devices of a node come first."""
    if ranks == 1 or not size:
        return 0.0
    inside = min(ranks, machines.devices_per_node)
    nodes = ranks / inside
    links = size * (inside - 1) / inside / rates.links if inside > 1 else 0.0
    between = size * (nodes - 1) / nodes / rates.network if nodes > 1 else 0.0
    return max(links, between) + software.latency


def _between_products(
    work: ModelWork,
    machines: Machines,
    layout: ParallelLayout,
    rates: _Rates,
    software: Software,
    *,
    tokens: int,
) -> float:
    """Return the seconds of a block's collectives that the next product waits for."""
    passes = 4 + 2 * (layout.recomputation is True)
    size = layout.reduced_bytes * tokens * work.block.width
    # Two sums of activations forward, two backward; each is a scatter and a gather.
    sums = 2 * _collective(size, layout.tensor, machines, rates, software)
    # Tokens go to their expert and return, forward and backward.
    experts = _collective(size, layout.experts, machines, rates, software)
    return passes * (sums + experts)


def _carried(
    work: ModelWork, machines: Machines, layout: ParallelLayout, rates: _Rates, software: Software
) -> float:
    """Return the seconds in which links carry a block's parameters, twice, and its gradients."""
    if layout.shards != "parameters" or layout.kept_whole:
        return 0.0
    size = layout.reduced_bytes * work.block.weights / layout.tensor
    return 3 * _collective(size, layout.replicas(machines.devices), machines, rates, software)


def _gradients(
    work: ModelWork,
    machines: Machines,
    layout: ParallelLayout,
    rates: _Rates,
    software: Software,
    *,
    backward: float,
) -> float:
    """Return what the last backward pass leaves of the sum of gradients over replicas, once a step."""
    ranks = layout.replicas(machines.devices)
    if layout.shards == "parameters" and not layout.kept_whole:
        return 0.0
    weights = work.parameters / (layout.tensor * layout.pipeline)
    beside = Machines(
        gpu=machines.gpu,
        devices_per_node=max(1, machines.devices_per_node // layout.tensor),
        nodes=machines.nodes,
        network=machines.network,
    )
    carried = 2 * _collective(layout.gradient_bytes * weights, ranks, beside, rates, software)
    return max(0.0, carried - backward) + software.exposed * min(carried, backward)


def _sent(work: ModelWork, machines: Machines, rates: _Rates, software: Software, *, tokens: int) -> float:
    """Return the seconds that activations take to the next stage and their gradients back."""
    size = 2 * 2 * tokens * work.block.width
    return size / (rates.network if machines.nodes > 1 else rates.links) + 2 * software.latency


def _optimizer(
    work: ModelWork, layout: ParallelLayout, rates: _Rates, software: Software, *, devices: int
) -> float:
    split = layout.replicas(devices) if layout.shards != "none" else 1
    mine = work.parameters / (layout.tensor * layout.pipeline * split)
    return software.optimizer * mine / rates.memory
