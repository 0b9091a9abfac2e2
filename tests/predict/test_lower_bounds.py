"""No step is predicted to be faster than the data sheet: its FLOP, what it reads, and what it sends."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.contracts.tree import ROOT
from twinrun.planning.project import Project
from twinrun.predict.calibration import Subject, calibration, rates_of
from twinrun.predict.configured_model import generic_flops
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.predict.step import IDEAL, peak
from twinrun.protocol.models import members

GPUS = [gpu for gpu in Project(ROOT).gpus.values() if gpu.link_gb_s]
KNOWN = calibration()
SHAPES = [one for one in members().values() if one.attention_heads()]


def drawn(count: int, seed: int) -> Iterator[tuple[Subject, dict[str, float]]]:
    """Yield layouts that divide, of any model, machines and software, and rates around the fitted."""
    source, found = random.Random(seed), 0
    powers = [2**exponent for exponent in range(8)]
    while found < count:
        shape, software = source.choice(SHAPES), source.choice(KNOWN.software)
        network = source.choice((1e9, 50e9))
        machines = Machines(source.choice(GPUS), source.choice(powers[:4]), source.choice(powers), network)
        layout = ParallelLayout(
            global_batch=source.choice((64, 512, 1024)),
            microbatch=source.choice(powers[:5]),
            tensor=source.choice(powers[:5]),
            pipeline=source.choice((1, 2, 4, 8)),
            interleaved=source.choice((1, 2)),
            context=source.choice((1, 1, 2, 4)),
            sequence_parallel=source.random() < 0.5,
            zero_bubble=source.random() < 0.5,
            precision=source.choice(("bf16", "bf16", "fp8", "nvfp4")),
            shards=source.choice(("none", "optimizer", "gradients", "parameters")),
            recomputation=source.choice((False, "selective", True)),
        )
        if not peak(machines.gpu, layout.precision) or layout.fault(shape.work(), machines):
            continue
        found += 1
        one = Subject(shape, machines, layout, software)
        rates = {name: rate * source.lognormvariate(0, 0.5) for name, rate in rates_of(one, KNOWN).items()}
        yield one, rates | {"time": 1.0}


def bounds(one: Subject) -> dict[str, float]:
    """Return the least seconds of a step by each thing that limits it, from the data sheet alone."""
    work, machines, layout = one.work, one.machines, one.layout
    gpu, devices, node = machines.gpu, machines.devices, machines.devices_per_node
    tokens, count = layout.global_batch * work.sequence, layout.microbatches(devices)
    copies, weights = layout.copies(devices), sum(product.weights for product in work.block.products)
    held = work.layers * weights / (layout.tensor * layout.pipeline)
    found = {
        "FLOP over peak": tokens * generic_flops(work) / devices / peak(gpu, layout.precision),
        # Products read their weights in three passes of each microbatch.
        "bytes over memory": 3 * count * 2 * held / gpu.device_bandwidth_bytes_s,
    }
    split = layout.shards == "parameters"
    size = layout.held(work) * (
        layout.reduced_bytes if split else one.software.summed_bytes or layout.gradient_bytes
    )
    passes = 2 * count if split else count + 1 if layout.shards == "gradients" else 2
    if copies > 1:
        inside = max(1, min(copies, node // layout.tensor))
        nodes = copies / inside
        # What a node sends of every group of copies that it has a part of.
        groups = min(node / inside, devices / copies)
        found["bytes over network"] = passes * groups * size * (nodes - 1) / nodes / (machines.network or 1.0)
    if layout.tensor > 1:
        stream = 2 * layout.microbatch * work.sequence / layout.context * work.block.width
        inside = min(layout.tensor, node)
        sums = 4 * 2 * stream * (inside - 1) / inside / ((gpu.link_gb_s or 0.0) * 1e9)
        found["bytes over links"] = count * work.layers / layout.pipeline * sums
    return found


@pytest.mark.parametrize(("count", "seed"), [(1000, 1), pytest.param(10_000, 2, marks=pytest.mark.nightly)])
def test_no_random_layout_is_under_a_lower_bound(count: int, seed: int) -> None:
    for one, rates in drawn(count, seed):
        for known in (rates, IDEAL):
            time = one.at(known).seconds
            for name, least in bounds(one).items():
                assert time >= least * (1 - 1e-9), (name, time, least, one)
