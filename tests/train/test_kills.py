"""Who is killed or told to end, when, and in which layout: what goes on ends as what was not disturbed."""

from __future__ import annotations

import functools
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.train.checkpoint_jobs import digests, free_port, rank_environment, saving, start
from tests.train.launcher import launch
from tests.train.small import STEPS, MakeJob
from tests.trials import INSIDE_SAVES, KILLED_LAUNCHER, KILLED_RANK, TOLD_RANK, Trials
from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.verification import verify
from twinrun.protocol.job import STOPPED
from twinrun.protocol.training import TrainingJob

LAYOUTS = ((2, "full"), (4, "none"), (1, "none"), (2, "none"), (4, "full"))
# System calls of two ranks' saves in a run, more than they make; a few far apart come first.
CALLS = sorted(((call, rank) for call in range(1, 36) for rank in (0, 1)), key=lambda one: one[0] % 18 != 1)
# A step takes so long that a kill of the launcher meets one, and a rank that trains on would be seen.
STEP_SECONDS, PATIENCE_SECONDS = 0.1, 120
# The kernel ends the ranks at once; a busy machine may not.
END_SECONDS = 5


def kill_rank(job: TrainingJob, draw: random.Random, _number: int) -> None:
    ended = start(job, KILL_RANK=draw.randrange(job.world_size), KILL_STEP=draw.randrange(STEPS))
    assert -9 in ended.statuses


def kill_inside_a_save(job: TrainingJob, _draw: random.Random, number: int) -> None:
    call, rank = CALLS[number]
    start(job, KILL_RANK=rank % job.world_size, KILL_CALL=call)
    assert job.checkpointing
    store = FolderStore(Path(job.checkpointing.place))
    for step in store.steps():
        verify(store, step)


def tell_rank(job: TrainingJob, draw: random.Random, _number: int) -> None:
    step = draw.randrange(STEPS - 1)
    ended = start(job, KILL_RANK=draw.randrange(job.world_size), TOLD_STEP=step)
    assert ended.statuses == (STOPPED,) * job.world_size, ended.said
    assert job.checkpointing
    assert FolderStore(Path(job.checkpointing.place)).steps()[-1] == step + 1


def kill_launcher(job: TrainingJob, draw: random.Random, _number: int) -> None:
    """Kill the launcher at a random moment of the run, and see its ranks end."""
    file, log = Path(job.out) / "job.json", Path(job.out) / "log"
    file.write_text(job.model_dump_json())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.launcher"])
    size = str(job.world_size)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": size}
    variables |= {"LOCAL_WORLD_SIZE": size, "STEP_SECONDS": str(STEP_SECONDS)}
    launcher = context.Process(target=launch, args=(str(file), str(log), variables, job.world_size))
    with rank_environment():
        launcher.start()
    step, deadline, lines = draw.randrange(STEPS - 1), time.monotonic() + PATIENCE_SECONDS, Path(job.metrics)
    while not lines.exists() or len(lines.read_text().splitlines()) <= step:
        assert launcher.exitcode is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(draw.random() * STEP_SECONDS)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    launcher.kill()
    launcher.join()
    assert len(children) == job.world_size
    deadline = time.monotonic() + END_SECONDS
    while left := [rank for rank in children if works(rank)]:
        assert time.monotonic() < deadline, f"ranks train on: {left}"
        time.sleep(0.01)


def works(process: str) -> bool:
    """Say whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


Fault = Callable[[TrainingJob, random.Random, int], None]
TABLE: dict[str, tuple[Fault, Trials]] = {
    "a rank is killed": (kill_rank, KILLED_RANK),
    "a rank is killed inside a save": (kill_inside_a_save, INSIDE_SAVES),
    "a rank is told to end": (tell_rank, TOLD_RANK),
    "the launcher is killed": (kill_launcher, KILLED_LAUNCHER),
}


def trials() -> Iterator[Any]:
    """Yield every trial of a night; those that are made for every change as well have no mark."""
    for who, (_, planned) in TABLE.items():
        for number in range(planned.nightly):
            marks = () if number < planned.change else (pytest.mark.trials,)
            yield pytest.param(who, number, marks=marks, id=f"{who}, {number}")


Undisturbed = Callable[[int, str], object]


def outcome(job: TrainingJob) -> object:
    ended = start(job)
    assert set(ended.statuses) == {0}, ended.said
    assert job.checkpointing
    return ended.losses, digests(Path(job.checkpointing.place), STEPS)


@pytest.fixture(scope="module")
def undisturbed(make_job: MakeJob, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return what gives the losses and the last checkpoint of a layout when nobody dies."""

    @functools.cache
    def run(world_size: int, sharding: str) -> object:
        place = tmp_path_factory.mktemp("undisturbed")
        return outcome(saving(make_job(world_size=world_size, sharding=sharding), place))

    return run


@pytest.mark.parametrize(("who", "number"), list(trials()))
def test_what_goes_on_ends_as_what_was_not_disturbed(
    undisturbed: Undisturbed, make_job: MakeJob, tmp_path: Path, who: str, number: int
) -> None:
    plant, planned = TABLE[who]
    world_size, sharding = LAYOUTS[number % len(LAYOUTS)]
    job = saving(make_job(world_size=world_size, sharding=sharding), tmp_path / "place")
    plant(job, random.Random(f"{planned.seed}/{number}"), number)
    assert outcome(job) == undisturbed(world_size, sharding)
    assert not list((tmp_path / "place").glob(".step-*"))


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
    refused = start(saving(make_job(world_size=2, sharding="none"), tmp_path / "chain"))
    assert set(refused.statuses) == {2}
    assert "the checkpoint was saved with another layout" in refused.said


@pytest.mark.parametrize(("begin", "damaged"), [(3, False), (1, False), (1, True)])
def test_a_leg_goes_on_from_the_end_of_the_one_before(
    make_job: MakeJob, tmp_path: Path, begin: int, *, damaged: bool
) -> None:
    def leg(place: str, steps: int, **settings: object) -> TrainingJob:
        job = make_job(microbatch=2)
        # A step must be left that is timed.
        short = job.training.model_copy(update={"steps": steps, "warmup_steps": 0})
        job = job.model_copy(update={"training": short})
        return saving(job, tmp_path / place, steps=1, **settings)

    first = start(leg("leg=1", 1))
    assert set(first.statuses) == {0}, first.said
    file = tmp_path / "leg=1" / "step-00000001" / "rank-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ damaged]))
    ended = start(leg("leg=2", 2, source=str(tmp_path / "leg=1"), begin=begin))
    if damaged:
        assert ended.statuses == (4,)
        assert "put aside: left in place; there is none before it" in ended.said
        assert "bring it again from where it was saved" in ended.said
        assert not list((tmp_path / "leg=2").glob("step-*"))
    else:
        assert ended.statuses == ((2,) if begin == 3 else (0,)), ended.said
        assert ("this leg goes on after step 3" in ended.said) == (begin == 3)
