"""Going on with other numbers of ranks: in mode `canonical` every bit is that of a run that does not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.train.checkpoint_jobs import Ended, digests, saving, start
from tests.train.small import STEPS, MakeJob
from tests.trials import OTHER_RANKS
from twinrun.protocol.training import TrainingJob

CHAIN = (4, 2, 1, 2, 4)
SEED = OTHER_RANKS.seed


def canonical(
    make_job: MakeJob, place: Path, *, ranks: int, steps: int = STEPS, **settings: object
) -> TrainingJob:
    """Return a job that sums in a tree; its schedule is that of the whole run, wherever it stops."""
    job = make_job(world_size=ranks, microbatch=2, summation="canonical", warmup_steps=0)
    job = job.model_copy(update={"training": job.training.model_copy(update={"steps": steps})})
    return saving(job, place, **{"steps": 1, "mode": "canonical"} | settings)


def whole_run(make_job: MakeJob, place: Path, *, ranks: int) -> Ended:
    ended = start(canonical(make_job, place, ranks=ranks))
    assert set(ended.statuses) == {0}, ended.said
    return ended


def chained(make_job: MakeJob, place: Path, chain: tuple[int, ...]) -> Ended:
    """Train one stretch of a run for each number of ranks, the first longer than the others."""
    first = STEPS - len(chain)
    for number, ranks in enumerate(chain, start=1):
        ended = start(canonical(make_job, place, ranks=ranks, steps=first + number))
        assert set(ended.statuses) == {0}, ended.said
    return ended


def test_the_tree_has_the_same_bits_on_other_numbers_of_ranks(make_job: MakeJob, tmp_path: Path) -> None:
    whole = whole_run(make_job, tmp_path / "whole", ranks=1)
    found = chained(make_job, tmp_path / "chain", CHAIN)
    assert found.losses == whole.losses
    assert len(found.losses) == STEPS
    assert digests(tmp_path / "chain", STEPS) == digests(tmp_path / "whole", STEPS)


@pytest.mark.trials
def test_any_order_of_numbers_of_ranks_has_the_same_bits(make_job: MakeJob, tmp_path: Path) -> None:
    whole = whole_run(make_job, tmp_path / "whole", ranks=2)
    draw = random.Random(SEED)
    for number in range(OTHER_RANKS.nightly):
        chain = tuple(draw.choice((1, 2, 4, 8)) for _ in range(draw.randrange(2, STEPS)))
        assert chained(make_job, tmp_path / str(number), chain).losses == whole.losses, chain
        assert digests(tmp_path / str(number), STEPS) == digests(tmp_path / "whole", STEPS)


def test_another_size_of_microbatch_is_another_tree(make_job: MakeJob, tmp_path: Path) -> None:
    assert set(start(canonical(make_job, tmp_path, ranks=1, steps=2)).statuses) == {0}
    job = canonical(make_job, tmp_path, ranks=1).model_copy(update={"microbatch": 4})
    ended = start(job)
    assert ended.statuses == (2,)
    assert "the checkpoint was saved with another layout" in ended.said
    assert ":microbatch" in ended.said


def test_a_tree_needs_powers_of_two(make_job: MakeJob, tmp_path: Path) -> None:
    job = canonical(make_job, tmp_path, ranks=1).model_copy(update={"microbatch": 5})
    ended = start(job)
    assert ended.statuses == (2,)
    assert "a tree of sums needs powers of two" in ended.said


@pytest.mark.parametrize(("begin", "expected"), [(3, "this leg goes on after step 3"), (1, "")])
def test_a_leg_goes_on_from_the_end_of_the_one_before(
    make_job: MakeJob, tmp_path: Path, begin: int, expected: str
) -> None:
    source = tmp_path / "leg=1"
    assert set(start(canonical(make_job, source, ranks=1, steps=1)).statuses) == {0}
    job = canonical(make_job, tmp_path / "leg=2", ranks=1, steps=2, source=str(source), begin=begin)
    ended = start(job)
    assert ended.statuses == ((2,) if expected else (0,)), ended.said
    assert expected in ended.said
    assert "after step 1" in ended.said


def test_a_damaged_source_is_named_and_left_as_it_is(make_job: MakeJob, tmp_path: Path) -> None:
    source = tmp_path / "leg=1"
    assert set(start(canonical(make_job, source, ranks=1, steps=1)).statuses) == {0}
    file = source / "step-00000001" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    ended = start(canonical(make_job, tmp_path / "leg=2", ranks=1, steps=2, source=str(source), begin=1))
    assert ended.statuses == (4,)
    assert "put aside: left in place; there is none before it" in ended.said
    assert "bring it again from where it was saved" in ended.said
    assert file.read_bytes() == content
    assert not list((tmp_path / "leg=2").glob("step-*"))
