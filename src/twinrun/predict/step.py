"""The time of an optimizer step, part by part: a model to be read from top to bottom.

A block takes what the device computes and what its products wait for, or what the host can start, whichever
is longer; parameters that are gathered meanwhile hide behind it but for a share. A step is its blocks and its
head, for every microbatch, with the empty slots of a pipeline, then the sum of gradients and the optimizer.

Ranks stand as Megatron places them: those of tensor parallelism next to each other, then those that share a
sequence, then replicas, then stages. A group whose ranks stand apart crosses nodes sooner, and the groups of
a node share its network.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from twinrun.predict.calibration import Calibration, Software
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.protocol.models.shape import ModelWork, Product

# Elements that eager kernels read and write in a forward pass, for each feature of the residual stream (two
# norms, two sums, three biases) and for each of the hidden layer (bias and activation).
STREAM_PASSES, HIDDEN_PASSES = 14, 3
# The backward pass reads what the forward one wrote, and writes gradients.
BACKWARD_PASSES = 1.5
# Share of a block's products that every other one is, taken as where software was fitted on rows of
# torchtitan: nobody counted which sizes these have.
ALTERNATE_PRODUCTS = 0.5
# Fused attention computes its weights again in the backward pass: five products for two.
ATTENTION_BACKWARD = 2.5
# Positions behind a token are skipped by fused kernels.
CAUSAL = 0.5
# Sequences times heads of a rank that Megatron's fused softmax takes are a multiple of this.
SOFTMAX_ROWS = 4
# A stage of a zero-bubble schedule fills two thirds of its empty slots with gradients of weights (ZB-H1, Qi
# et al. 2024, arXiv:2401.10241, section 2.1).
ZERO_BUBBLE = 1 / 3
# The fullest expert has so many times the tokens of the mean one: stated, not fitted.
IMBALANCE = 1.2
# Matrix units multiply fp8 twice as fast as bf16 on every GPU that has it.
FP8_PEAK = 2.0
ACTIVATION_BYTES = 2


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
    fp8: float
    features: float
    work: float
    attention: float
    memory: float
    scan: float
    links: float
    network: float

    def product(self, one: Product, *, tokens: float, tensor: int, fp8: bool = False) -> float:
        """Return the seconds of one product over `tokens`: its FLOP, or the bytes it reads and writes."""
        columns = one.columns / (tensor if one.cut == "columns" else 1)
        inner = one.inner / (tensor if one.cut == "inner" else 1)
        flops = 2 * tokens * columns * inner * (1 + self.features * (1 / columns + 1 / inner)) + self.work
        moved = ACTIVATION_BYTES * (tokens * (columns + inner) + columns * inner)
        return max(flops / (self.fp8 if fp8 else self.peak), moved / self.memory)


def step_time(
    work: ModelWork,
    machines: Machines,
    layout: ParallelLayout,
    *,
    software: Software,
    calibration: Calibration,
) -> StepTime:
    """Return the time of an optimizer step, part by part."""
    rates = _rates(machines, layout, software, calibration)
    ranks = _Ranks(machines, layout, rates, software.latency)
    tokens = layout.microbatch * work.sequence / layout.context
    count, layers = layout.microbatches(machines.devices), work.layers / layout.pipeline
    again = software.recomputed if layout.recomputation is True else 0.0
    added: dict[str, float] = {}
    if not isinstance(layout.recomputation, bool):
        # It keeps attention and the results of products, or some of these; where attention is not fused it
        # is the attention matrices that are computed again.
        alternate = layout.recomputation == "selective-alternate"
        products = software.selective_products or (ALTERNATE_PRODUCTS if alternate else 0.0)
        added = {"products": products, "memory": 1.0, "attention": 0.0}
        added = {"products": 0.0, "memory": 0.0, "attention": 1.0} if software.unfused else added
    busy = {
        name: forward * (1 + back + added.get(name, again))
        for name, (forward, back) in _block(work, layout, rates, software, tokens=tokens).items()
    }
    computing = sum(busy.values())
    between = _between_products(work, layout, ranks, software, tokens=tokens)
    host = _host(work, layout, software)
    started = max(computing + between, host)
    # No shape is faster than the data sheet: fitted rates are shares of it.
    share = rates.peak / machines.gpu.device_peak_flops
    least = share * busy["products"] + calibration.memory * (computing - busy["products"] + between)
    factor, _ = software.off_by(work.block.width, layout.tensor, tokens)
    started = max(least, started * factor)
    gathered = 0.0
    if layout.shards == "parameters" and not layout.kept_whole:
        # A block's parameters come twice, and its gradients go once.
        gathered = 3 * ranks.copies(layout.reduced_bytes * layout.held_of_block(work.block) / layout.tensor)
    waits = max(0.0, gathered - started) + software.exposed * min(gathered, started)
    head = 3 * rates.product(work.head, tokens=tokens, tensor=layout.tensor)
    head += software.logits * tokens * work.head.columns / layout.tensor / rates.memory
    slot, sent = layers * (started + waits), 0.0
    if layout.pipeline > 1:
        sent = layout.interleaved * ranks.stages(2 * ACTIVATION_BYTES * tokens * work.block.width)
    empty = (layout.pipeline - 1) * (ZERO_BUBBLE if layout.zero_bubble else 1.0)
    backward = layers * started * 2 / 3
    return StepTime(
        products=count * layers * busy["products"],
        attention=count * layers * busy["attention"],
        memory=count * layers * busy["memory"],
        head=count * head,
        host=count * layers * (started - computing - between),
        collectives=count * (layers * (between + waits) + sent)
        + _gradients(work, layout, ranks, software, backward=backward),
        bubble=empty * (slot + sent) / layout.interleaved,
        optimizer=_optimizer(work, machines, layout, rates, software) + software.step,
    )


def _rates(
    machines: Machines, layout: ParallelLayout, software: Software, calibration: Calibration
) -> _Rates:
    gpu = machines.gpu
    peak = gpu.device_peak_flops * calibration.rate("products", software, gpu)
    fp8 = gpu.device_peak_flops * FP8_PEAK * calibration.rate("fp8", software, gpu) if layout.fp8 else peak
    return _Rates(
        peak=peak,
        fp8=max(fp8, peak),
        features=calibration.products.features,
        work=calibration.products.work,
        attention=0.0
        if software.unfused
        else gpu.device_bandwidth_bytes_s * calibration.rate("attention", software, gpu),
        memory=gpu.device_bandwidth_bytes_s * calibration.memory,
        scan=software.scan.get(gpu.id, 0.0),
        links=(gpu.link_gb_s or 0.0) * 1e9 * software.links,
        network=(machines.network or 0.0) * software.network,
    )


def _block(
    work: ModelWork, layout: ParallelLayout, rates: _Rates, software: Software, *, tokens: float
) -> dict[str, tuple[float, float]]:
    """Return by part the seconds of a block's forward pass, and how many of them the backward pass takes."""
    block, tensor = work.block, layout.tensor
    products = sum(_products(one, layout, rates, tokens=tokens) for one in block.products)
    if block.scanned:
        attention = tokens * block.scanned / rates.scan / tensor, software.scan_backward
    elif software.unfused:
        scores = software.unfused * block.scores / rates.memory
        attention = tokens / tensor * (block.attention_flops / rates.peak + scores), 2.0
    else:
        # Kernels compute no faster than the matrix units, whatever the memory could bring.
        rate = min(rates.attention, rates.peak)
        attention = tokens / tensor * block.attention_flops * CAUSAL / rate, ATTENTION_BACKWARD
    # Norms and sums are computed by every rank, unless their tokens are split too.
    stream = STREAM_PASSES * block.width / (tensor if layout.sequence_parallel else 1)
    elements = stream + HIDDEN_PASSES * block.hidden / tensor
    moved = ACTIVATION_BYTES * software.elements * elements * tokens / rates.memory
    if layout.fp8:
        # The input of a product is read once more and written in one byte, in both passes.
        moved += 3 * tokens * sum(one.inner for one in block.products) / tensor / rates.memory
    return {"products": (products, 2.0), "attention": attention, "memory": (moved, BACKWARD_PASSES)}


def _products(one: Product, layout: ParallelLayout, rates: _Rates, *, tokens: float) -> float:
    """Return the seconds of a block's product, those of its experts one after the other."""
    if one.experts == 1:
        return rates.product(one, tokens=tokens, tensor=layout.tensor, fp8=layout.fp8)
    own = one.experts / layout.experts
    each = tokens * one.active * IMBALANCE / own
    return own * rates.product(one, tokens=each, tensor=layout.tensor, fp8=layout.fp8)


def _host(work: ModelWork, layout: ParallelLayout, software: Software) -> float:
    """Return the seconds that the host needs to start a block, forward and backward."""
    seconds = software.host + software.tensor_host * (layout.tensor - 1)
    if software.unfused and work.block.scores:
        rows = layout.microbatch * (work.block.scores // work.sequence) // layout.tensor
        seconds += software.softmax_host if rows % SOFTMAX_ROWS else 0.0
    return seconds * (4.0 if layout.recomputation is True else 3.0)


@dataclass(frozen=True)
class _Ranks:
    """Groups of ranks, by how far apart their members stand, and what their collectives take."""

    machines: Machines
    layout: ParallelLayout
    rates: _Rates
    latency: float

    def tensor(self, size: float) -> float:
        """Return the seconds in which ranks of tensor parallelism gather, or scatter, `size` bytes."""
        return self._collective(size, self.layout.tensor, 1)

    def context(self, size: float) -> float:
        """Return the same of ranks that share a sequence."""
        return self._collective(size, self.layout.context, self.layout.tensor)

    def experts(self, size: float) -> float:
        """Return the same of ranks that share experts, which exchange tokens."""
        return self._collective(size, self.layout.experts, self.layout.tensor)

    def copies(self, size: float) -> float:
        """Return the same of ranks that hold the same parameters, or parts of them."""
        return self._collective(size, self.layout.copies(self.machines.devices), self.layout.tensor)

    def stages(self, size: float) -> float:
        """Return the seconds in which a stage sends `size` bytes, each rank of it a part."""
        stride = self.layout.tensor * self.layout.copies(self.machines.devices)
        if self.machines.nodes > 1 and stride * self.layout.pipeline > self.machines.devices_per_node:
            pipelines = max(1.0, self.machines.devices_per_node / self.layout.tensor)
            return size * pipelines / self.rates.network + 2 * self.latency
        return size / self.rates.links + 2 * self.latency

    def _collective(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds in which `ranks` that stand `stride` apart gather, or scatter, `size` bytes."""
        if ranks == 1 or not size:
            return 0.0
        node = self.machines.devices_per_node
        inside = max(1, min(ranks, node // stride))
        nodes = ranks / inside
        links = size * (inside - 1) / inside / self.rates.links if inside > 1 else 0.0
        # Every group of the node sends its own.
        groups = min(node / inside, self.machines.devices / ranks)
        between = groups * size * (nodes - 1) / nodes / self.rates.network if nodes > 1 else 0.0
        return max(links, between) + self.latency


def _between_products(
    work: ModelWork, layout: ParallelLayout, ranks: _Ranks, software: Software, *, tokens: float
) -> float:
    """Return the seconds of a block's collectives that the next product waits for."""
    passes = 4 + 2 * (layout.recomputation is True)
    size = layout.reduced_bytes * tokens * work.block.width
    # Two sums of activations forward, two backward; each is a scatter and a gather.
    sums = 2 * software.tensor_exposed * ranks.tensor(size)
    # Tokens go to their experts and return, forward and backward.
    active = max(one.active for one in work.block.products)
    experts = ranks.experts(size * active * IMBALANCE)
    # Keys and values come forward and backward, and their gradients go.
    keys = layout.reduced_bytes * tokens * layout.context * work.block.keys / layout.tensor
    shared = (3 + (layout.recomputation is True)) * software.exposed * ranks.context(keys)
    return passes * (sums + experts) + shared


def _gradients(
    work: ModelWork, layout: ParallelLayout, ranks: _Ranks, software: Software, *, backward: float
) -> float:
    """Return what the last backward pass leaves of the sum of gradients over copies, once a step."""
    if layout.shards == "parameters" and not layout.kept_whole:
        return 0.0
    size = software.summed_bytes or layout.gradient_bytes
    carried = 2 * ranks.copies(size * layout.held(work))
    return max(0.0, carried - backward) + software.gradients * min(carried, backward)


def _optimizer(
    work: ModelWork, machines: Machines, layout: ParallelLayout, rates: _Rates, software: Software
) -> float:
    split = layout.copies(machines.devices) if layout.shards != "none" else 1
    return software.optimizer * layout.held(work) / split / rates.memory
