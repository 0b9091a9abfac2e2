"""No step is predicted to be faster than the data sheet: its FLOP, what it reads, and what it sends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.contracts.tree import ROOT
from twinrun.foundation.errors import InputError
from twinrun.planning.project import Project
from twinrun.predict.calibration import Software, calibration
from twinrun.predict.configured_model import generic_flops
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.predict.step import FP8_PEAK, step_time
from twinrun.protocol.models import members
from twinrun.protocol.models.shape import ModelWork

GPUS = [gpu for gpu in Project(ROOT).gpus.values() if gpu.link_gb_s]
KNOWN = calibration()
SHAPES = [one for one in members().values() if one.attention_heads()]


def drawn(count: int, seed: int) -> Iterator[tuple[ModelWork, Machines, ParallelLayout, Software]]:
    """Yield layouts that divide, of any model on any machines with any software."""
    source, found = random.Random(seed), 0
    powers = [2**exponent for exponent in range(8)]
    while found < count:
        work = source.choice(SHAPES).work()
        machines = Machines(
            source.choice(GPUS),
            source.choice((1, 2, 4, 8)),
            source.choice(powers),
            source.choice((1e9, 50e9)),
        )
        layout = ParallelLayout(
            global_batch=source.choice((64, 512, 1024)),
            microbatch=source.choice(powers[:5]),
            tensor=source.choice(powers[:5]),
            pipeline=source.choice((1, 2, 4, 8)),
            interleaved=source.choice((1, 2)),
            context=source.choice((1, 1, 2, 4)),
            sequence_parallel=source.random() < 0.5,
            zero_bubble=source.random() < 0.5,
            fp8=machines.gpu.fp8 and source.random() < 0.3,
            shards=source.choice(("none", "optimizer", "gradients", "parameters")),
            recomputation=source.choice((False, "selective", True)),
        )
        try:
            layout.check(work, machines)
        except InputError:
            continue
        found += 1
        yield work, machines, layout, source.choice(KNOWN.software)


def bounds(
    work: ModelWork, machines: Machines, layout: ParallelLayout, software: Software
) -> dict[str, float]:
    """Return the least seconds of a step by each thing that limits it, from the data sheet alone."""
    gpu, devices = machines.gpu, machines.devices
    tokens = layout.global_batch * work.sequence
    flops = tokens * generic_flops(work)[0] / devices
    copies = layout.copies(devices)
    weights = layout.held(work)
    found = {
        "FLOP over peak": flops / (gpu.device_peak_flops * (FP8_PEAK if layout.fp8 else 1)),
        # Products read their weights in three passes of each microbatch.
        "bytes over memory": 3
        * layout.microbatches(devices)
        * 2
        * work.layers
        * sum(one.weights for one in work.block.products)
        / (layout.tensor * layout.pipeline)
        / gpu.device_bandwidth_bytes_s,
    }
    size = 2 * weights * (software.summed_bytes or layout.gradient_bytes)
    if copies > 1 and layout.shards != "parameters":
        node = machines.devices_per_node
        inside = max(1, min(copies, node // layout.tensor))
        nodes = copies / inside
        # What a node sends of every group of copies that it has a part of, less what a backward pass hides.
        groups = min(node / inside, devices / copies)
        sent = groups * size * (nodes - 1) / nodes / (machines.network or 1.0)
        found["bytes over network"] = sent
    if layout.tensor > 1:
        stream = 2 * layout.microbatch * work.sequence / layout.context * work.block.width
        inside = min(layout.tensor, machines.devices_per_node)
        sums = 4 * 2 * stream * (inside - 1) / inside / ((gpu.link_gb_s or 0.0) * 1e9)
        found["bytes over links"] = layout.microbatches(devices) * work.layers / layout.pipeline * sums
    return found


def test_no_random_layout_is_under_a_lower_bound() -> None:
    for work, machines, layout, software in drawn(1500, 1):
        time = step_time(work, machines, layout, software=software, calibration=KNOWN).seconds
        for name, least in bounds(work, machines, layout, software).items():
            assert time >= least, (name, time, least, machines, layout, software.id)


@pytest.mark.nightly
def test_ten_thousand_layouts_are_not_under_a_lower_bound() -> None:
    for work, machines, layout, software in drawn(10_000, 2):
        time = step_time(work, machines, layout, software=software, calibration=KNOWN).seconds
        assert time >= max(bounds(work, machines, layout, software).values())


def test_gradients_of_tensor_ranks_share_the_network_of_their_node() -> None:
    """13 billion gradients of fp32 leave each of 16 nodes twice, at 100 Gbit/s: 7.8 s."""
    gpus = {gpu.id: gpu for gpu in GPUS}
    work = members()["mpt-13b"].work()
    machines = Machines(gpus["h100-80gb"], 8, 16, 12.5e9)
    layout = ParallelLayout(global_batch=512, microbatch=4, tensor=8)
    software = KNOWN.of("twinrun-2026")
    for cut in (layout, replace(layout, shards="parameters", tensor=4)):
        time = step_time(work, machines, cut, software=software, calibration=KNOWN)
        assert time.collectives >= 0.9 * 7.7
