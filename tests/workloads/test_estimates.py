"""The estimates of memory and time, against the sizes that ran and the published rows."""

from __future__ import annotations

import pytest

from tests.records import PROJECT, hardware, plan
from twinrun.foundation.text import GIB
from twinrun.workloads.training.points import Budget


@pytest.mark.parametrize(
    ("gpu", "memory_gib", "model", "largest"),
    [("h100-80gb", 79.65, "mpt-3b", 4), ("h100-80gb", 79.65, "mpt-1b", 16), ("h200", 140.4, "mpt-7b", 3)],
)
def test_the_first_size_on_one_device_is_the_one_that_runs(
    gpu: str, memory_gib: float, model: str, largest: int
) -> None:
    assert PROJECT.gpus[gpu].device_memory_bytes
    shape = PROJECT.recipe("mpt7b-scaling").tables.models[model]
    one = {"model": model, "global_batch": 192, "sharding": "none", "microbatch": "auto"}
    training = plan("mpt7b-scaling", scale="node", gpu="h200").part.training.model_copy(update=one)
    memory = {"device_memory_bytes": int(memory_gib * GIB)}
    budget = Budget(shape=shape, training=training, hardware=hardware(gpu).model_copy(update=memory))
    assert budget.microbatches(1)[0] == largest


@pytest.mark.parametrize("claim", ["throughput-1-node", "throughput-32-nodes"])
def test_the_published_rows_lie_in_the_interval_of_the_prediction(claim: str) -> None:
    """Figure 5 of the publication has TFLOP/s of an MI250 card, of two devices, over the steps alone."""
    (published,) = (one for one in PROJECT.recipe("mpt7b-scaling").published.claim if one.id == claim)
    stated = published.hardware
    assert stated
    part = plan("mpt7b-scaling").part
    nodes = hardware(stated.gpu).model_copy(update={"network_gbit_s": 800})
    budget = Budget(shape=part.shape, training=part.training, hardware=nodes)
    one = budget.predicted(nodes=stated.cards // 4, devices_per_node=8, microbatch=6)
    assert one.interval
    low, high = (2 * tokens * part.shape.flops_per_token() / 1e12 for tokens in one.interval)
    assert low < published.value < high
