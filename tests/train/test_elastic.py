"""A leg goes on where the one before it ended, on the same or on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.train.checkpoint_jobs import saving, start
from tests.train.small import STEPS, MakeJob
from twinrun.protocol.training import TrainingJob


def leg(
    make_job: MakeJob, place: Path, *, ranks: int = 1, steps: int = STEPS, **settings: object
) -> TrainingJob:
    """Return a job whose schedule is that of the whole run, wherever it stops."""
    job = make_job(world_size=ranks, sharding="none", microbatch=2)
    job = job.model_copy(update={"training": job.training.model_copy(update={"steps": steps})})
    return saving(job, place, **{"steps": 1} | settings)


def test_bounded_goes_on_with_other_ranks_and_exact_does_not(make_job: MakeJob, tmp_path: Path) -> None:
    whole = start(leg(make_job, tmp_path / "whole"))
    assert set(start(leg(make_job, tmp_path / "two", ranks=2, steps=2)).statuses) == {0}
    refused = start(leg(make_job, tmp_path / "two"))
    assert refused.statuses == (2,)
    assert "the checkpoint was saved with another layout" in refused.said
    assert ":world_size" in refused.said
    ended = start(leg(make_job, tmp_path / "two", mode="bounded"))
    assert ended.statuses == (0,), ended.said
    both = [[float.fromhex(loss) for loss in one.losses] for one in (ended, whole)]
    assert both[0] == pytest.approx(both[1], rel=1e-5)


@pytest.mark.parametrize(("begin", "expected"), [(3, "this leg goes on after step 3"), (1, "")])
def test_a_leg_goes_on_from_the_end_of_the_one_before(
    make_job: MakeJob, tmp_path: Path, begin: int, expected: str
) -> None:
    source = tmp_path / "leg=1"
    assert set(start(leg(make_job, source, steps=1)).statuses) == {0}
    job = leg(make_job, tmp_path / "leg=2", steps=2, source=str(source), begin=begin)
    ended = start(job)
    assert ended.statuses == ((2,) if expected else (0,)), ended.said
    assert expected in ended.said
    assert "after step 1" in ended.said


def test_a_damaged_source_is_named_and_left_as_it_is(make_job: MakeJob, tmp_path: Path) -> None:
    source = tmp_path / "leg=1"
    assert set(start(leg(make_job, source, steps=1)).statuses) == {0}
    file = source / "step-00000001" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    ended = start(leg(make_job, tmp_path / "leg=2", steps=2, source=str(source), begin=1))
    assert ended.statuses == (4,)
    assert "put aside: left in place; there is none before it" in ended.said
    assert "bring it again from where it was saved" in ended.said
    assert file.read_bytes() == content
    assert not list((tmp_path / "leg=2").glob("step-*"))
