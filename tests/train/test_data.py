"""Verification of prepared data, and the order of samples at any world size."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("streaming")

import numpy as np

from tests.train.small import SHAPE, MakeJob
from twinrun.foundation.errors import InputError
from twinrun.protocol.layout import Layout
from twinrun.protocol.training import TrainingJob
from twinrun.train.data import Order, collate, load_corpus

# Of samples, in two shards; an epoch of whole global batches leaves some out.
SHARDS = (60, 29)


@pytest.mark.parametrize(
    ("what", "shape", "training"),
    [
        ("sequence", {"sequence": 32}, {}),
        ("vocabulary", {"vocabulary": 60}, {}),
        ("samples", {}, {"global_batch": 4096}),
    ],
)
def test_data_that_does_not_suit_the_model_is_refused(
    make_job: MakeJob, what: str, shape: dict[str, int], training: dict[str, int]
) -> None:
    job = make_job(shape=SHAPE.model_copy(update=shape), **training)
    with pytest.raises(InputError, match=f"corpus.json:{what}: the prepared data does not suit the run"):
        load_corpus(job)


def test_a_control_run_has_each_batch_in_an_order_of_its_own() -> None:
    steps = [
        [{"tokens": np.array([one]), "hash": one} for one in range(-3 * step, 3)] for step in (1, 2, 3, 4)
    ]
    runs = [
        [collate(step, control=control)["tokens"].flatten().tolist() for step in steps]
        for control in range(6)
    ]
    for run in runs:
        assert [sorted(order) for order in run] == runs[0], "the samples are those of the run"
    assert len({str(run) for run in runs}) == 6
    again = collate(steps[3], control=5)
    assert again["tokens"].flatten().tolist() == again["hashes"].tolist() == runs[5][3]


@pytest.mark.parametrize("skipped", [0, 2])
@pytest.mark.parametrize(
    ("nodes", "ranks", "gpu"), [(1, 2, False), (1, 4, True), (2, 4, True), (16, 1, False)]
)
def test_global_batches_are_the_same_at_any_world_size(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, skipped: int, nodes: int, ranks: int, *, gpu: bool
) -> None:
    """Also where readers beside a rank take turns, and from a step on."""
    alone = global_batches(make_job(), monkeypatch)
    job = make_job(world_size=nodes * ranks, microbatch=1).model_copy(update={"accelerator": gpu})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert np.array_equal(alone[skipped:], global_batches(job, monkeypatch, skipped=skipped))


def test_replicas_read_the_same(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(world_size=4).model_copy(update={"layout": Layout(tensor=2)})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert np.array_equal(global_batches(make_job(), monkeypatch), global_batches(job, monkeypatch))


def test_seed_and_epoch_change_the_order(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    first = global_batches(make_job(), monkeypatch)
    assert not np.array_equal(first, global_batches(make_job(), monkeypatch, epoch=1))
    assert not np.array_equal(first, global_batches(make_job(seed=18), monkeypatch))


def global_batches(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch, *, epoch: int = 0, skipped: int = 0
) -> Any:
    """Return the sample numbers of each global batch, sorted, as all ranks together read them."""
    found = []
    for number in range(0, job.world_size, job.replicas):
        monkeypatch.setenv("RANK", str(number))
        order = Order(job, SHARDS)
        order.epoch, order.skipped = epoch, skipped
        found.append(list(order))
    return np.sort(np.concatenate(found, axis=1), axis=1)
