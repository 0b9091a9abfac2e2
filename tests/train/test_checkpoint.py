"""The recipe's scripts save and resume: what is interrupted ends as what is not, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("composer")

from tests.train.checkpoint_jobs import digests, saving
from tests.train.small import RECIPE, STEPS, MakeJob, launch
from tests.train.test_scaling import LOADED, run_here
from twinrun.foundation.manifest import load_json
from twinrun.protocol.training import TrainingJob, TrainingResult


def result_of(job: TrainingJob, script: str) -> TrainingResult:
    if job.world_size == 1:
        return run_here(script, job)
    done = launch(RECIPE / f"{script}.py", job, modules=LOADED)
    assert done.returncode == 0, done.stderr[-4000:]
    return load_json(Path(job.out) / "result.json", TrainingResult)


@pytest.mark.parametrize(
    ("script", "world_size", "sharding"),
    [
        ("train_plain", 1, "none"),
        ("train", 1, "none"),
        pytest.param("train_plain", 2, "full", marks=pytest.mark.trials),
        ("train", 2, "none"),
        ("train", 2, "full"),
    ],
)
def test_a_resumed_run_ends_as_one_that_was_not_stopped(
    make_job: MakeJob, tmp_path: Path, script: str, world_size: int, sharding: str
) -> None:
    place = tmp_path / "place"
    whole = result_of(saving(make_job(world_size=world_size, sharding=sharding), place), script)
    last = digests(place, STEPS)
    # As if the run had been killed before its last save.
    shutil.rmtree(place / f"step-{STEPS:08d}")
    resumed = result_of(saving(make_job(world_size=world_size, sharding=sharding), place), script)

    assert [step.loss for step in resumed.steps] == [step.loss for step in whole.steps]
    assert resumed.order_hash == whole.order_hash
    assert digests(place, STEPS) == last
