"""What the meter writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("streaming")

import torch

from tests.train.small import GLOBAL_BATCH, MakeJob
from twinrun.foundation.errors import RunError
from twinrun.protocol.training import StepMetrics, TrainingJob
from twinrun.train import rank
from twinrun.train.metrics import Meter

CPU = torch.device("cpu")


def run_steps(job: TrainingJob, hashes: list[list[int]]) -> Meter:
    rank.introduce(job)
    meter = Meter(job, CPU)
    meter.start()
    for step, values in enumerate(hashes, start=1):
        meter.add_samples(torch.tensor(values))
        meter.add_loss(torch.tensor(float(step)), GLOBAL_BATCH)
        meter.end_step()
    return meter


def test_each_step_is_a_line(make_job: MakeJob) -> None:
    job = make_job()
    meter = run_steps(job, [[1], [2], [3]])
    lines = Path(job.metrics).read_text().splitlines()
    assert [StepMetrics.model_validate_json(line) for line in lines] == meter.steps
    assert {step.attempt for step in meter.steps} == {"1"}
    assert [(step.step, step.loss, step.timed) for step in meter.steps] == [
        (1, 1.0, False),
        (2, 2.0, False),
        (3, 3.0, True),
    ]


def test_order_hash_knows_steps_but_not_places_in_a_batch(make_job: MakeJob) -> None:
    large = 2**63 - 1
    one = run_steps(make_job(), [[large, large, 5], [7, 8]]).order_hash
    assert one == run_steps(make_job(), [[5, large, large], [8, 7]]).order_hash
    assert one != run_steps(make_job(), [[7, 8], [large, large, 5]]).order_hash


def test_a_loss_that_is_no_number_ends_the_run(make_job: MakeJob) -> None:
    meter = Meter(make_job(), CPU)
    meter.start()
    meter.add_loss(torch.tensor(float("nan")), GLOBAL_BATCH)
    with pytest.raises(RunError, match="devices=1, step 1: the loss is not finite"):
        meter.end_step()
