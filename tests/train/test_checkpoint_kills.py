"""Ranks that die: at steps, and inside saves."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.train.checkpoint_jobs import Ended, digests, saving, start
from tests.train.small import STEPS, MakeJob
from tests.trials import INSIDE_SAVES, KILLED_RANK
from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.verification import verify

LAYOUTS = ((2, "full"), (4, "none"), (2, "none"), (4, "full"))
# System calls of a rank's saves in a run: more than it makes.
CALLS = 36
RANKS = (0, 1)


Undisturbed = Callable[[int, str], object]


@pytest.fixture(scope="module")
def undisturbed(make_job: MakeJob, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return what gives the losses and the last checkpoint of a layout when nobody dies."""

    @functools.cache
    def run(world_size: int, sharding: str) -> object:
        place = tmp_path_factory.mktemp("undisturbed")
        return outcome(start(saving(make_job(world_size=world_size, sharding=sharding), place)), place)

    return run


def outcome(ended: Ended, place: Path) -> object:
    assert set(ended.statuses) == {0}, ended.said
    return ended.losses, digests(place, STEPS)


def kill_and_resume(
    undisturbed: Undisturbed, make_job: MakeJob, place: Path, draw: random.Random, trials: int
) -> None:
    for number in range(trials):
        world_size, sharding = LAYOUTS[number % len(LAYOUTS)]
        here = place / str(number)
        job = saving(make_job(world_size=world_size, sharding=sharding), here)
        killed = start(job, KILL_RANK=draw.randrange(world_size), KILL_STEP=draw.randrange(STEPS))
        assert -9 in killed.statuses
        assert outcome(start(job), here) == undisturbed(world_size, sharding)


def test_a_killed_rank_changes_nothing(undisturbed: Undisturbed, make_job: MakeJob, tmp_path: Path) -> None:
    kill_and_resume(undisturbed, make_job, tmp_path, random.Random(KILLED_RANK.seed), KILLED_RANK.change)


@pytest.mark.trials
def test_no_killed_rank_changes_anything(undisturbed: Undisturbed, make_job: MakeJob, tmp_path: Path) -> None:
    kill_and_resume(
        undisturbed, make_job, tmp_path, random.Random((KILLED_RANK.seed or 0) + 1), KILLED_RANK.nightly
    )


def kill_inside_saves(undisturbed: Undisturbed, make_job: MakeJob, place: Path, calls: range) -> None:
    """Kill each rank at each system call of its saves; what is published then must be whole."""
    for rank in RANKS:
        died = 0
        for call in calls:
            here = place / f"{rank}-{call}"
            job = saving(make_job(world_size=2), here)
            killed = start(job, KILL_RANK=rank, KILL_CALL=call)
            died += -9 in killed.statuses
            store = FolderStore(here)
            for step in store.steps():
                verify(store, step)
            assert outcome(start(job), here) == undisturbed(2, "full"), (rank, call, killed.said)
            assert not list(here.glob(".step-*"))
        assert died


def test_a_kill_inside_a_save_tears_nothing(
    undisturbed: Undisturbed, make_job: MakeJob, tmp_path: Path
) -> None:
    calls = range(1, CALLS, 18)
    assert len(calls) * len(RANKS) == INSIDE_SAVES.change
    kill_inside_saves(undisturbed, make_job, tmp_path, calls)


@pytest.mark.trials
def test_no_kill_inside_a_save_tears_anything(
    undisturbed: Undisturbed, make_job: MakeJob, tmp_path: Path
) -> None:
    calls = range(1, CALLS)
    assert len(calls) * len(RANKS) == INSIDE_SAVES.nightly
    kill_inside_saves(undisturbed, make_job, tmp_path, calls)


def test_other_numbers_of_ranks_go_on_inside_an_envelope(make_job: MakeJob, tmp_path: Path) -> None:
    whole = start(saving(make_job(world_size=4, sharding="full"), tmp_path / "whole"))
    losses: list[str] = []
    chain = ((4, "full"), (2, "none"), (1, "none"), (2, "full"), (4, "full"))
    for number, (world_size, sharding) in enumerate(chain, start=1):
        # Each run trains a step more, and saves it.
        job = make_job(world_size=world_size, sharding=sharding, steps=number + 1, warmup_steps=0)
        optimizer = make_job().training.optimizer
        job = job.model_copy(update={"training": job.training.model_copy(update={"optimizer": optimizer})})
        ended = start(saving(job, tmp_path / "chain", steps=1, mode="bounded"))
        assert set(ended.statuses) == {0}, ended.said
        losses = ended.losses
    floats = [float.fromhex(loss) for loss in losses]
    assert floats == pytest.approx([float.fromhex(loss) for loss in whole.losses], rel=1e-6)
