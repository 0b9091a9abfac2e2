"""The sizes of a sweep, as the recipe and the machine allow them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.records import TRAINING, plan
from twinrun.foundation.errors import InputError, MachineError
from twinrun.manifests.recipe import Sweep
from twinrun.predict.memory import BUCKET_BYTES
from twinrun.workloads.sweep import sizes
from twinrun.workloads.training.estimates import Budget
from twinrun.workloads.training.manifest import TrainingPlan

DEVICES, NODES = Sweep(devices="powers-of-two"), Sweep(nodes=(1, 2), devices_per_node=8)


def test_a_machine_is_swept_up_to_all_it_has() -> None:
    assert sizes(DEVICES, requested=None, devices=8) == (1, 2, 4, 8)
    assert sizes(DEVICES, requested=None, devices=7) == (1, 2, 4)


def test_listed_sizes_are_cut_at_what_the_machine_has() -> None:
    listed = Sweep(devices=(1, 2, 4))
    assert sizes(listed, requested=None, devices=4) == (1, 2, 4)
    assert sizes(listed, requested=None, devices=3) == (1, 2)
    assert sizes(listed, requested=None, devices=0) == (1, 2, 4)
    with pytest.raises(MachineError, match="fewer devices"):
        sizes(Sweep(devices=(2, 4)), requested=None, devices=1)


def test_what_is_asked_for_is_sorted_and_counts_once() -> None:
    assert sizes(DEVICES, requested="4,1,4", devices=8) == (1, 4)
    assert sizes(DEVICES, requested=[4, 1], devices=0) == (1, 4)


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(MachineError, match="fewer devices"):
        sizes(DEVICES, requested="1,4", devices=2)


@pytest.mark.parametrize("requested", ["0", "a", "1,b", [], [1.5], True])
def test_what_is_no_count_is_refused(requested: Any) -> None:
    with pytest.raises(InputError, match="expected counts"):
        sizes(DEVICES, requested=requested, devices=8)


def test_a_scale_that_counts_nodes_has_no_devices() -> None:
    assert sizes(NODES, requested=None, devices=8) == (1, 2)
    with pytest.raises(InputError, match="counts nodes"):
        sizes(NODES, requested="1", devices=8)


def test_a_global_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="does not divide over the devices"):
        plan(TRAINING, scale="smoke", gpu=None, settings=("devices=3", "global_batch=16"), devices=0)


def test_sharding_alone_divides_the_state_of_a_model() -> None:
    part = plan(TRAINING, scale="node", gpu="h200", settings=("model=mpt-1b",)).part
    assert isinstance(part, TrainingPlan)
    needed = {}
    for sharding in ("full", "none"):
        training = part.training.model_copy(update={"sharding": sharding})
        budget = Budget(shape=part.shape, training=training, device_memory_bytes=None)
        needed[sharding] = [budget.needed(microbatch=1, world=world) for world in (1, 8)]
    # Whole models reduce their gradients in buckets beside them.
    assert needed["none"][1] - needed["none"][0] == BUCKET_BYTES * part.shape.parameters()
    assert needed["full"][1] < needed["full"][0]
