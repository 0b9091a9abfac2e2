"""The trainers save and resume: what is interrupted ends as what is not, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("composer")

from tests.train.checkpoint_jobs import digests, saving
from tests.train.small import STEPS, TRAINING, MakeJob, launch
from tests.train.test_scaling import run_here
from twinrun.foundation.manifest import load_json
from twinrun.protocol.training import TrainingJob, TrainingResult


def result_of(job: TrainingJob) -> TrainingResult:
    if job.world_size == 1:
        return run_here(job)
    done = launch(TRAINING, job)
    assert done.returncode == 0, done.stderr[-4000:]
    return load_json(Path(job.out) / "result.json", TrainingResult)


@pytest.mark.parametrize(
    ("trainer", "world_size", "sharding"),
    [
        ("plain", 1, "none"),
        ("composer", 1, "none"),
        pytest.param("plain", 2, "full", marks=pytest.mark.trials),
        ("composer", 2, "none"),
        ("composer", 2, "full"),
    ],
)
def test_a_resumed_run_ends_as_one_that_was_not_stopped(
    make_job: MakeJob, tmp_path: Path, trainer: str, world_size: int, sharding: str
) -> None:
    place = tmp_path / "place"
    whole = result_of(saving(make_job(world_size=world_size, sharding=sharding, trainer=trainer), place))
    last = digests(place, STEPS)
    # As if the run had been killed before its last save.
    shutil.rmtree(place / f"step-{STEPS:08d}")
    resumed = result_of(saving(make_job(world_size=world_size, sharding=sharding, trainer=trainer), place))

    assert [step.loss for step in resumed.steps] == [step.loss for step in whole.steps]
    # The save from which it went on is measured after it is made.
    assert (len(whole.blocked_seconds), len(resumed.blocked_seconds)) == (3, 2)
    assert [one.gradient_norm for one in resumed.steps] == [one.gradient_norm for one in whole.steps]
    assert None not in {one.gradient_norm for one in whole.steps}
    assert resumed.order_hash == whole.order_hash
    assert digests(place, STEPS) == last
