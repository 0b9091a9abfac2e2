"""Ranks of which one is told to end: all save at the end of the step, and go on as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("streaming")

from tests.train.checkpoint_jobs import digests, saving, start
from tests.train.small import STEPS, MakeJob
from twinrun.checkpoints.folder import FolderStore
from twinrun.protocol.job import STOPPED


@pytest.mark.parametrize(("world_size", "sharding"), [(1, "none"), (2, "none"), (2, "full")])
def test_ranks_save_at_the_end_of_the_step_in_which_one_is_told(
    make_job: MakeJob, tmp_path: Path, world_size: int, sharding: str
) -> None:
    job, stopped = (make_job(world_size=world_size, sharding=sharding) for _ in range(2))
    whole = start(saving(job, tmp_path / "whole", steps=STEPS))
    place = tmp_path / "stopped"
    ended = start(saving(stopped, place, steps=STEPS), KILL_RANK=world_size - 1, TOLD_STEP=2)
    assert ended.statuses == (STOPPED,) * world_size, ended.said
    assert FolderStore(place).steps() == [3]
    resumed = start(saving(stopped, place, steps=STEPS))
    assert set(resumed.statuses) == {0}, resumed.said
    assert resumed.losses == whole.losses
    assert digests(place, STEPS) == digests(tmp_path / "whole", STEPS)


def test_ranks_that_are_told_in_the_last_step_are_done(make_job: MakeJob, tmp_path: Path) -> None:
    ended = start(saving(make_job(), tmp_path / "place"), KILL_RANK=0, TOLD_STEP=STEPS - 1)
    assert ended.statuses == (0,), ended.said
    assert len(ended.losses) == STEPS
