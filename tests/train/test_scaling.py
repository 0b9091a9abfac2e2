"""The trainers as ranks run them: one loss curve, whoever computes it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("composer")

from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.train.small import GLOBAL_BATCH, STEPS, TRAINING, MakeJob, launch
from twinrun.foundation.manifest import load_json
from twinrun.protocol.training import StepMetrics, TrainingJob, TrainingResult
from twinrun.train import rank, training
from twinrun.train.corpus import Corpus


def losses(result: TrainingResult) -> list[float]:
    return [step.loss for step in result.steps]


def run_here(job: TrainingJob) -> TrainingResult:
    """Train on one rank, in this process: an import less."""
    with warnings.catch_warnings():
        # Composer and what it imports warn about each other.
        warnings.simplefilter("ignore")
        rank.introduce(job)
        return training.train(job)


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> TrainingJob:
    return make_job()


@pytest.fixture(scope="module")
def alone(job: TrainingJob) -> TrainingResult:
    return run_here(job)


def test_a_run_reports_every_step(alone: TrainingResult, job: TrainingJob) -> None:
    assert [step.step for step in alone.steps] == list(range(1, STEPS + 1))
    assert [step.timed for step in alone.steps] == [False, False] + [True] * (STEPS - 2)
    lines = Path(job.metrics).read_text().splitlines()
    assert tuple(StepMetrics.model_validate_json(line) for line in lines) == alone.steps


def test_the_loss_falls_past_the_end_of_an_epoch(alone: TrainingResult, corpus: Corpus) -> None:
    assert corpus.samples // GLOBAL_BATCH < STEPS
    assert losses(alone)[-1] < 0.9 * losses(alone)[0]


@pytest.mark.parametrize(
    ("trainer", "parallelism", "options"),
    [
        ("composer", "fsdp2", {"microbatch": 2, "activation_checkpointing": True}),
        ("composer", "ddp", {"sharding": "none"}),
        ("composer", "fsdp2", {"microbatch": 2, "reduction": "step"}),
        ("plain", "fsdp2", {"microbatch": 2, "reduction": "step"}),
    ],
)
def test_two_ranks_train_as_one(
    alone: TrainingResult, make_job: MakeJob, trainer: str, parallelism: str, options: dict[str, Any]
) -> None:
    """Gradients are means over ranks, clipping is global, batches are the same: else curves part."""
    job = make_job(world_size=2, trainer=trainer, **options)
    ended = launch(TRAINING, job)
    assert ended.returncode == 0, ended.stderr
    result = load_json(Path(job.out) / "result.json", TrainingResult)
    assert result.parallelism == parallelism
    assert losses(result) == pytest.approx(losses(alone), rel=1e-5)
    assert result.order_hash == alone.order_hash
    assert result.data_hash == alone.data_hash


def test_two_trainings_at_once_do_not_meet(alone: TrainingResult, make_job: MakeJob) -> None:
    jobs = [make_job(world_size=2, trainer="plain", microbatch=8) for _ in range(2)]
    ended = launch(TRAINING, jobs[0], beside=jobs[1])
    assert ended.returncode == 0, ended.stderr
    for job in jobs:
        result = load_json(Path(job.out) / "result.json", TrainingResult)
        assert losses(result) == pytest.approx(losses(alone), rel=1e-5)
        assert result.order_hash == alone.order_hash


def test_a_plain_loop_trains_as_composer_does(alone: TrainingResult, make_job: MakeJob) -> None:
    result = run_here(make_job(trainer="plain"))
    assert losses(result) == pytest.approx(losses(alone), rel=1e-5)
    assert result.order_hash == alone.order_hash


def test_no_optimizer_waits_for_the_loss_of_a_closure(make_job: MakeJob) -> None:
    given: list[object] = []
    hook = register_optimizer_step_pre_hook(
        lambda _, positional, named: given.append((positional[1:], named))
    )
    try:
        run_here(make_job(steps=2, warmup_steps=1))
    finally:
        hook.remove()
    assert given == [((), {}), ((), {})]
