"""Predictions against what was published and recorded, and against what a layout must cost."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import cache
from statistics import mean
from typing import Any

import pytest

from tests.contracts.tree import ROOT
from tools.fit_predictions import Row, rows
from twinrun.foundation.text import GIB
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import Run, Subject, calibration, told
from twinrun.predict.claims import scores
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.predict.prediction import Prediction, predict
from twinrun.protocol.models import ModelShape, member

GPUS = Project(ROOT).gpus
KNOWN = calibration()
SHARDED = ParallelLayout(global_batch=1536, microbatch=2, shards="parameters")
FP8 = SHARDED.replace(global_batch=32, shards="optimizer", precision="fp8")


@cache
def residuals() -> tuple[tuple[Row, Run, Prediction], ...]:
    """Return every row beside what is predicted of it for somebody else's machine."""
    runs = [(row, row.run(GPUS, KNOWN)) for row in rows()]
    return tuple((row, run, predict(replace(run.subject, place="here"))) for row, run in runs)


def of(
    gpu: Gpu | str, layout: ParallelLayout, *, model: str | ModelShape = "mpt-7b", **more: Any
) -> Prediction:
    shape = member(model, place="model") if isinstance(model, str) else model
    software, runs = KNOWN.of(more.pop("software", "twinrun-2026")), more.pop("runs", ())
    machines = Machines(GPUS[gpu] if isinstance(gpu, str) else gpu, more.pop("devices", 8), **more)
    return predict(Subject(shape, machines, layout, software), runs)


def seconds(layout: ParallelLayout, **more: Any) -> float:
    terms: dict[str, Any] = {"model": "llama-8b", "nodes": 4, "network": 50e9, "software": "torchtitan-2025"}
    return told(of("h100-80gb", layout, **(terms | more))).seconds


def test_rows_are_of_sources_that_are_named_and_lie_near_their_predictions() -> None:
    errors = defaultdict(list)
    for row, run, one in residuals():
        assert row.source in KNOWN.source
        if one.time and row.experts == 1:
            errors[row.source].append((abs(one.time.seconds / run.seconds - 1), one, run))
    assert mean(mean(error for error, _, _ in group) for group in errors.values()) < 0.12
    every = [one for group in errors.values() for one in group]
    assert len(every) > 1100
    inside = [abs(math.log(one.time.seconds / run.seconds)) <= one.half for _, one, run in every if one.time]
    assert mean(inside) > 0.85


def test_each_source_left_out_whole_has_a_score() -> None:
    found = {one.source: one for one in scores() if one.runs == 0}
    assert found.keys() == KNOWN.source.keys()
    assert all(one.rows == sum(row.source == name for row in rows()) for name, one in found.items())
    assert sum(one.error * one.rows for one in found.values()) / len(rows()) < 0.2


def test_rows_of_amd_lie_inside_of_intervals_that_say_something() -> None:
    amd = [(run, one) for row, run, one in residuals() if row.gpu.startswith("mi")]
    assert len({one.machines.gpu.id for _, one in amd}) == 6
    for run, one in amd:
        assert one.time
        assert abs(math.log(one.time.seconds / run.seconds)) <= one.half < math.log(1.5)


def test_no_order_is_said_that_measurements_contradict() -> None:
    """MLPerf and Megatron Bridge have 31,423 tokens a second on the MI355X and 30,113 on the B200."""
    slow, fast = (of(gpu, FP8, model="llama-8b", software="megatron-2025") for gpu in ("b200", "mi355x"))
    assert slow.interval
    assert fast.interval
    assert fast.interval[1] > slow.interval[0]


def test_a_run_draws_the_centre_to_it_and_narrows_the_interval() -> None:
    far: dict[str, Any] = {"nodes": 64, "network": 400e9}
    layout = SHARDED.replace(microbatch=1)
    before, one_node = of("mi300x", layout, **far), of("mi300x", SHARDED.replace(global_batch=16))
    assert before.time
    assert one_node.time
    run = Run(one_node, one_node.time.seconds * 1.3)
    after = of("mi300x", layout, runs=[run], **far)
    assert after.time
    assert 1.1 < after.time.seconds / before.time.seconds < 1.3
    assert after.half < before.half == after.half_without_runs
    thrice = of("mi300x", layout, runs=[Run(replace(one_node), run.seconds) for _ in range(3)], **far)
    assert thrice.half < after.half


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"nodes": 8, "network": 1e9 / 8}, "networks of that speed"),
        ({"devices": 1024}, "nodes of so many devices"),
        ({"model": "llama-405b", "devices": 1}, "states alone do not fit"),
        ({"nodes": 2}, "--network"),
        ({"gpu": GPUS["mi300a"].model_copy(update={"link_gb_s": None})}, "link_gb_s"),
        ({"gpu": "mi250", "layout": SHARDED.replace(precision="fp8")}, "no fp8"),
        ({"gpu": "h200", "layout": SHARDED.replace(precision="nvfp4")}, "no nvfp4"),
        ({"gpu": "l40s", "model": "mambaoutai"}, "no selective scan"),
        ({"layout": SHARDED.replace(context=2)}, "twinrun-2026 has no context"),
        ({"layout": SHARDED.replace(pipeline=4, shards="gradients")}, "shards=gradients with tensor"),
        ({"layout": SHARDED.replace(offload="optimizer")}, "no transfer to the host"),
    ],
)
def test_what_cannot_be_said_says_why(more: dict[str, Any], words: str) -> None:
    asked: dict[str, Any] = {"gpu": "h200", "layout": SHARDED} | more
    if asked.get("devices") == 1024:
        asked["layout"] = SHARDED.replace(global_batch=2048)
    found = of(asked.pop("gpu"), asked.pop("layout"), **asked)
    assert found.time is None
    assert words in (found.unknown or "")


def test_memory_is_what_was_measured_and_calls_nothing_impossible_that_ran() -> None:
    """Nobody published what Megatron Bridge and MLPerf's largest runs compute again."""
    fits = [one.memory.fit(GPUS[row.gpu]) for row, _, one in residuals() if row.software != "megatron-2025"]
    assert len(fits) > 1100
    assert "DOES NOT FIT" not in fits
    peaks = [(one.memory.bytes / GIB, row.peak_gib) for row, _, one in residuals() if row.peak_gib]
    assert len(peaks) == 58
    assert mean(abs(said / peak - 1) for said, peak in peaks) < 0.08


def test_devices_lose_as_much_as_measured_where_there_are_more() -> None:
    """Runs that differ in nodes alone, up to 5,120 devices: their rates a device are as far apart."""
    groups = defaultdict[str, list[tuple[int, int, float, float]]](list)
    own = {"seconds", "nodes", "global_batch", "peak_gib", "devices_per_node"}
    for row, run, one in residuals():
        tokens, devices = row.global_batch * row.sequence, one.machines.devices
        if one.time:
            group = groups[str(row.model_dump(exclude=own))]
            group.append((row.nodes, devices, tokens / devices / run.seconds, one.rate / devices))
    drifts = []
    for several in groups.values():
        (_, few, measured, said), (nodes, many, *last) = min(several), max(several)
        if nodes > 1 and many > few:
            drifts.append(abs(last[0] / measured - last[1] / said))
    assert len(drifts) > 10
    assert mean(drifts) < 0.03
    far = [of("mi300x", SHARDED.replace(global_batch=48 * n), nodes=n, network=400e9) for n in (1, 8, 128)]
    found = [one.rate / one.machines.devices for one in far]
    assert found == sorted(found, reverse=True)
    assert 0.5 * found[0] < found[-1] < found[0]
    assert far[-1].half > far[0].half


def test_what_a_layout_switches_costs_and_saves_what_it_should() -> None:
    whole = SHARDED.replace(global_batch=512, microbatch=1)
    cut = whole.replace(shards="none", tensor=8, pipeline=4)
    # Every rank computes norms and sums, unless their tokens are split.
    assert seconds(cut.replace(sequence_parallel=True)) < seconds(cut)
    # Stages of few microbatches wait less with parts of the model, and with gradients of weights between.
    few = cut.replace(global_batch=8)
    assert seconds(few.replace(interleaved=2)) < seconds(few)
    assert seconds(few.replace(zero_bubble=True)) < seconds(few)
    # The products alone are faster in fewer bits, not the rest.
    assert 0.5 < seconds(whole.replace(precision="fp8")) / seconds(whole) < 0.95
    # Matrices that are cut over two nodes wait for the network.
    assert seconds(cut.replace(pipeline=1, tensor=16)) > seconds(cut.replace(pipeline=1))
    # Gradients that are split are summed after every microbatch.
    more: dict[str, Any] = {"software": "twinrun-2026", "model": "llama-3b"}
    once, often = (SHARDED.replace(microbatch=1, shards=one) for one in ("optimizer", "gradients"))
    assert seconds(often, **more) > 1.02 * seconds(once, **more)
    # Two ranks to a sequence have half of its tokens each, and keys and values to exchange.
    assert seconds(whole) < seconds(whole.replace(context=2)) < 2 * seconds(whole)
