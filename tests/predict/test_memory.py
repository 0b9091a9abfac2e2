"""The memory of a device: what is split, what grows, and what a pipeline keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinrun.predict.memory import Memory, memory
from twinrun.predict.parallel_layout import ParallelLayout
from twinrun.protocol.models import member

WORK = member("mpt-1b", place="model").work()
WHOLE = ParallelLayout(global_batch=64, microbatch=1)


def needed(layout: ParallelLayout, *, devices: int = 8) -> Memory:
    return memory(WORK, layout, devices=devices)


def test_states_are_split_by_what_is_sharded() -> None:
    totals = [
        needed(replace(WHOLE, shards=shards)).bytes
        for shards in ("none", "optimizer", "gradients", "parameters")
    ]
    assert totals == sorted(totals, reverse=True)
    whole = needed(WHOLE)
    assert whole.parameters + whole.gradients + whole.optimizer == 16 * WORK.parameters


@pytest.mark.parametrize("recomputation", [True, False])
def test_only_activations_grow_with_the_microbatch(recomputation: bool) -> None:
    sharded = replace(WHOLE, shards="parameters", recomputation=recomputation)
    one, two, four = (needed(sharded.with_microbatch(size)) for size in (8, 16, 32))
    assert four.bytes - two.bytes == 2 * (two.bytes - one.bytes)
    assert replace(two, activations=0) == replace(four, activations=0)


def test_recomputation_keeps_less() -> None:
    kept = [needed(replace(WHOLE, recomputation=switch)).activations for switch in (True, "selective", False)]
    assert kept == sorted(kept)
    assert len(set(kept)) == 3


def test_masters_are_beside_16_bit_parameters() -> None:
    zero = needed(replace(WHOLE, shards="optimizer", parameter_bytes=2, masters=True), devices=4)
    assert zero.parameters + zero.gradients == 4 * WORK.parameters
    assert zero.optimizer == 12 * (WORK.parameters // 4)
    assert zero.copies == 0


def test_interleaved_stages_keep_more_and_tensors_less() -> None:
    staged = replace(WHOLE, pipeline=4)
    plain = needed(staged).activations
    parts = needed(replace(staged, interleaved=2)).activations
    cut = needed(replace(staged, tensor=2)).activations
    # Four microbatches of a quarter of the layers, and 3 / 2 of one more.
    assert parts == pytest.approx(plain * (1 + 3 / (4 * 2)))
    assert cut == pytest.approx(plain / 2)


def test_what_is_offloaded_is_not_on_the_device() -> None:
    zero = replace(WHOLE, shards="parameters")
    assert needed(replace(zero, offload="optimizer")).optimizer == 0
    assert needed(replace(zero, offload="parameters")).parameters == 0
