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
from twinrun.foundation.errors import InputError
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import Basis, Run, basis, calibration, told
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.predict.prediction import Prediction, predict
from twinrun.predict.rows import Row, rows, scores
from twinrun.protocol.models import ModelShape, member

GPUS = Project(ROOT).gpus
KNOWN = calibration()
SHARDED = ParallelLayout(global_batch=1536, microbatch=2, shards="parameters")
FP8 = replace(SHARDED, global_batch=32, shards="optimizer", precision="fp8")


@cache
def residuals() -> tuple[tuple[Row, Run, Prediction], ...]:
    """Return every row beside what is predicted of it for somebody else's machine."""
    found = []
    for row in rows():
        run = row.run(GPUS, KNOWN)
        one = run.subject
        found.append((row, run, predict(one.shape, one.machines, one.layout, Basis(one.software, KNOWN))))
    return tuple(found)


def of(
    gpu: Gpu | str, layout: ParallelLayout, *, model: str | ModelShape = "mpt-7b", **more: Any
) -> Prediction:
    row = GPUS[gpu] if isinstance(gpu, str) else gpu
    shape = member(model, place="model") if isinstance(model, str) else model
    software, runs = more.pop("software", "twinrun-2026"), more.pop("runs", ())
    return predict(shape, Machines(row, more.pop("devices", 8), **more), layout, basis(software, runs))


def seconds(layout: ParallelLayout, **more: Any) -> float:
    terms: dict[str, Any] = {"model": "llama-8b", "nodes": 4, "network": 50e9, "software": "torchtitan-2025"}
    return told(
        of("h100-80gb", layout, **(terms | more)).subject, Basis(KNOWN.of("twinrun-2026"), KNOWN)
    ).seconds


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
    slow, fast = (
        of(gpu, FP8, model="llama-8b", software="megatron-2025").interval for gpu in ("b200", "mi355x")
    )
    assert slow
    assert fast
    assert fast[1] > slow[0]


def test_a_run_draws_the_centre_to_it_and_narrows_the_interval() -> None:
    far: dict[str, Any] = {"nodes": 64, "network": 400e9}
    layout = replace(SHARDED, microbatch=1)
    before, one_node = of("mi300x", layout, **far), of("mi300x", replace(SHARDED, global_batch=16))
    assert before.time
    assert one_node.time
    run = Run(one_node.subject, one_node.time.seconds * 1.3)
    after = of("mi300x", layout, runs=[run], **far)
    assert after.time
    assert 1.1 < after.time.seconds / before.time.seconds < 1.3
    assert after.half < before.half == after.half_without_runs
    thrice = of("mi300x", layout, runs=[run] * 3, **far)
    assert thrice.half <= after.half


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"nodes": 8, "network": 1e9 / 8}, "networks of that speed"),
        ({"devices": 1024}, "nodes of so many devices"),
        ({"model": "llama-405b", "devices": 1}, "states alone do not fit"),
        ({"nodes": 2}, "--network"),
        ({"gpu": GPUS["mi300a"].model_copy(update={"link_gb_s": None})}, "link_gb_s"),
        ({"gpu": "mi250", "layout": replace(SHARDED, precision="fp8")}, "no fp8"),
        ({"gpu": "h200", "layout": replace(SHARDED, precision="nvfp4")}, "no nvfp4"),
        ({"gpu": "l40s", "model": "mambaoutai"}, "no selective scan"),
        ({"layout": replace(SHARDED, context=2)}, "twinrun-2026 has no context"),
        (
            {"layout": replace(SHARDED, pipeline=4, shards="gradients")},
            "shards=gradients with tensor or pipeline",
        ),
        ({"layout": replace(SHARDED, offload="optimizer")}, "no transfer to the host"),
    ],
)
def test_what_cannot_be_said_says_why(more: dict[str, Any], words: str) -> None:
    asked: dict[str, Any] = {"gpu": "h200", "layout": SHARDED} | more
    if asked.get("devices") == 1024:
        asked["layout"] = replace(SHARDED, global_batch=2048)
    found = of(asked.pop("gpu"), asked.pop("layout"), **asked)
    assert found.time is None
    assert words in (found.unknown or "")


def test_memory_calls_nothing_impossible_that_ran() -> None:
    """Nobody published what Megatron Bridge and MLPerf's largest runs compute again."""
    fits = [one.memory.fit(GPUS[row.gpu]) for row, _, one in residuals() if row.software != "megatron-2025"]
    assert len(fits) > 1100
    assert "DOES NOT FIT" not in fits


def test_more_nodes_are_never_faster_a_device() -> None:
    rates = [of("mi300x", replace(SHARDED, global_batch=48 * n), nodes=n, network=400e9) for n in (1, 8, 128)]
    found = [one.tokens_per_second or 0.0 for one in rates]
    assert found == sorted(found, reverse=True)
    assert 0.5 * found[0] < found[-1] < found[0]
    assert rates[-1].half > rates[0].half


@pytest.mark.parametrize(
    ("changed", "devices", "words"),
    [
        ({"tensor": 4}, 7, "does not divide 7 devices"),
        ({"tensor": 3}, 3, "does not divide 4096 features"),
        ({"global_batch": 100}, 8, "does not divide 100 sequences"),
        ({"pipeline": 64}, 64, "a part of a stage has a layer"),
        ({"experts": 16}, 8, "experts are spread"),
        ({"microbatch": 0}, 8, "expected a count"),
    ],
)
def test_what_does_not_divide_is_refused(changed: dict[str, Any], devices: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        of("h200", replace(SHARDED, **changed), devices=devices)


def test_what_a_layout_switches_costs_and_saves_what_it_should() -> None:
    whole = replace(SHARDED, global_batch=512, microbatch=1)
    cut = replace(whole, shards="none", tensor=8, pipeline=4)
    # Every rank computes norms and sums, unless their tokens are split.
    assert seconds(replace(cut, sequence_parallel=True)) < seconds(cut)
    # Stages of few microbatches wait less with parts of the model, and with gradients of weights between.
    few = replace(cut, global_batch=8)
    assert seconds(replace(few, interleaved=2)) < seconds(few)
    assert seconds(replace(few, zero_bubble=True)) < seconds(few)
    # The products alone are faster in fewer bits, not the rest.
    assert 0.5 < seconds(replace(whole, precision="fp8")) / seconds(whole) < 0.95
    # Matrices that are cut over two nodes wait for the network.
    assert seconds(replace(cut, pipeline=1, tensor=16)) > seconds(replace(cut, pipeline=1))
    # Two ranks to a sequence have half of its tokens each, and keys and values to exchange.
    assert seconds(whole) < seconds(replace(whole, context=2)) < 2 * seconds(whole)


def test_gradients_that_are_split_are_summed_after_every_microbatch() -> None:
    one, two = (replace(SHARDED, microbatch=1, shards=shards) for shards in ("optimizer", "gradients"))
    terms: dict[str, Any] = {"nodes": 4, "network": 50e9, "software": "twinrun-2026", "model": "llama-3b"}
    assert seconds(two, **terms) > 1.02 * seconds(one, **terms)


def test_stages_may_be_uneven_and_the_longest_takes_the_time() -> None:
    """126 blocks over 64 parts: two in each, and one less where the embedding and the loss are."""
    layout = replace(
        SHARDED,
        microbatch=1,
        tensor=8,
        pipeline=8,
        interleaved=8,
        context=2,
        shards="optimizer",
        precision="fp8",
    )
    terms: dict[str, Any] = {"model": "llama-405b", "nodes": 128, "network": 400e9}
    terms["software"] = "megatron-2025"
    uneven = seconds(layout, **terms)
    assert uneven < seconds(replace(layout, interleaved=1), **terms)
    assert layout.stage_layers(member("llama-405b", place="").work()) == 16


def test_a_head_that_matrix_units_do_not_take_costs_more_where_attention_is_not_fused() -> None:
    shape = member("gpt3-125m", place="model").model_copy(update={"width": 13824, "heads": 108})
    terms: dict[str, Any] = {"software": "megatron-2022", "nodes": 4, "network": 200e9}
    layout = replace(SHARDED, microbatch=1, tensor=4, shards="none")
    wide = seconds(layout, model=shape, **terms)
    odd = seconds(layout, model=shape.model_copy(update={"heads": 128}), **terms)
    assert odd > 1.15 * wide


def test_experts_take_the_time_of_the_fullest_and_exchange_tokens() -> None:
    layout = replace(SHARDED, global_batch=512, microbatch=8)
    dense, sparse = (of("h200", layout, model=one) for one in ("gpt3-125m", "gpt3-125m-moe"))
    rests = basis("twinrun-2026")
    assert told(sparse.subject, rests).seconds > told(dense.subject, rests).seconds
    assert sparse.half > dense.half


def test_a_scan_that_nobody_timed_is_predicted_from_code() -> None:
    die, larger = (of(gpu, SHARDED, model="mambaoutai") for gpu in ("mi250", "mi250x"))
    assert die.time
    assert larger.time
    # 110 compute units for 104.
    assert larger.time.attention < die.time.attention
    assert die.half > of("h200", SHARDED, model="mambaoutai").half
