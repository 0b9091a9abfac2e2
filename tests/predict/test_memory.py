"""The memory of a device: what is split, what grows, and what a pipeline keeps."""

from __future__ import annotations

import pytest

from twinrun.foundation.text import GIB
from twinrun.predict.memory import Memory, memory
from twinrun.predict.parallel_layout import ParallelLayout
from twinrun.protocol.models import member
from twinrun.protocol.models.mpt import MptShape

WORK = member("mpt-1b", place="model").work()
WHOLE = ParallelLayout(global_batch=64, microbatch=1)


def needed(layout: ParallelLayout, *, devices: int = 8) -> Memory:
    return memory(WORK, layout, devices=devices)


def test_states_are_split_by_what_is_sharded() -> None:
    shards = ("none", "optimizer", "gradients", "parameters")
    totals = [needed(WHOLE.replace(shards=one)).bytes for one in shards]
    assert totals == sorted(totals, reverse=True)
    whole = needed(WHOLE)
    assert whole.parameters + whole.gradients + whole.optimizer == 16 * WORK.parameters
    # Masters are beside parameters of 16 bits.
    zero = needed(WHOLE.replace(shards="optimizer", parameter_bytes=2, masters=True), devices=4)
    assert zero.parameters + zero.gradients == (2 + 4) * WORK.parameters
    assert (zero.optimizer, zero.copies) == (12 * (WORK.parameters // 4), 0)


@pytest.mark.parametrize("recomputation", [True, "selective", False])
def test_only_activations_grow_with_the_microbatch(recomputation: bool) -> None:
    sharded = WHOLE.replace(shards="parameters", recomputation=recomputation)
    one, two, four = (needed(sharded.replace(microbatch=size)) for size in (8, 16, 32))
    assert four.activations - two.activations == 2 * (two.activations - one.activations)
    assert two._replace(activations=0) == four._replace(activations=0)
    assert needed(WHOLE.replace(recomputation=True)).activations <= needed(sharded).activations


# Korthikanti et al. 2022, arXiv:2205.05198, table 3 and figure 1: width, heads, layers, pipeline, parts,
# devices, batch, microbatch, GiB of activations without and with sequence parallelism and recomputation.
PUBLISHED = [
    (6144, 64, 48, 1, 1, 8, 4, 4, 59.25, 9.5625),
    (12288, 96, 96, 8, 3, 64, 64, 1, 66.84375, 12.3515625),
    (20480, 128, 105, 35, 3, 280, 280, 1, 114.0234375, 23.076171875),
    (25600, 160, 128, 64, 1, 512, 512, 1, 131.25, 26.5625),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"width {row[0]}")
def test_activations_of_megatron_are_the_published(row: tuple[float, ...]) -> None:
    *counts, whole, selective = row
    width, heads, layers, pipeline, parts, devices, batch, microbatch = (int(one) for one in counts)
    work = MptShape(width=width, heads=heads, layers=layers, vocabulary=51200, sequence=2048).work()
    layout = ParallelLayout(global_batch=batch, microbatch=microbatch, tensor=8, pipeline=pipeline)
    layout = layout.replace(interleaved=parts, parameter_bytes=2, masters=True, scores_kept=True)
    less = layout.replace(recomputation="selective", sequence_parallel=True)
    found = [memory(work, one, devices=devices).activations / GIB for one in (layout, less)]
    assert found[0] == pytest.approx(whole, rel=0.001)
    # Ours has the attention matrices of the one block that is computed again.
    assert selective < found[1] < selective * 1.09


def test_a_stage_has_its_part_and_no_more_microbatches_than_there_are() -> None:
    staged = WHOLE.replace(pipeline=4, global_batch=8)
    block = WORK.layers * WORK.block.weights // 4
    assert needed(staged, devices=4).parameters == 4 * (block + WORK.embedding)
    few, many = needed(staged.replace(global_batch=2), devices=4), needed(staged, devices=4)
    assert 2 * few.activations == many.activations
    # What is offloaded is not on the device.
    zero = WHOLE.replace(shards="parameters")
    assert needed(zero.replace(offload="optimizer")).optimizer == 0
    assert needed(zero.replace(offload="parameters")).parameters == 0
