"""Launchers that are killed: their ranks end too, and the run goes on bit for bit."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.train.checkpoint_jobs import digests, free_port, rank_environment, saving
from tests.train.launcher import launch
from tests.train.small import STEPS, MakeJob
from tests.trials import KILLED_LAUNCHER
from twinrun.protocol.training import TrainingJob

LAYOUTS = ((2, "none"), (2, "full"), (4, "none"), (4, "full"))
# A step takes so long that a kill meets one, and a rank that trains on would be seen.
STEP_SECONDS = 0.1
PATIENCE_SECONDS = 120
# The kernel ends the ranks at once; a busy machine may not.
END_SECONDS = 5


def launched(job: TrainingJob) -> ForkServerProcess:
    """Start a launcher of the ranks of `job`."""
    file = Path(job.out) / "job.json"
    file.write_text(job.model_dump_json())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.launcher"])
    ranks = str(job.world_size)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": ranks}
    variables |= {"LOCAL_WORLD_SIZE": ranks, "STEP_SECONDS": str(STEP_SECONDS)}
    launcher = context.Process(
        target=launch, args=(str(file), str(Path(job.out) / "log"), variables, job.world_size)
    )
    with rank_environment():
        launcher.start()
    return launcher


def children(launcher: int) -> list[int]:
    text = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    return [int(child) for child in text.split()]


def is_alive(process: int) -> bool:
    """Say whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def steps_done(job: TrainingJob) -> int:
    path = Path(job.metrics)
    return len(path.read_text().splitlines()) if path.exists() else 0


def said(job: TrainingJob) -> str:
    return (Path(job.out) / "log").read_text()[-4000:]


def run_to_end(job: TrainingJob, place: Path) -> object:
    """Run a job and return the digests of all that it ends with, its losses among it."""
    launcher = launched(job)
    launcher.join(PATIENCE_SECONDS)
    assert launcher.exitcode == 0, said(job)
    return digests(place, STEPS)


def kill_launcher(job: TrainingJob, draw: random.Random) -> None:
    """Kill the launcher at a random moment of the run, and see its ranks end."""
    launcher = launched(job)
    assert launcher.pid
    step, deadline = draw.randrange(STEPS - 1), time.monotonic() + PATIENCE_SECONDS
    while steps_done(job) < step or len(children(launcher.pid)) < job.world_size:
        assert launcher.exitcode is None, said(job)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(draw.random() * STEP_SECONDS)
    ranks = children(launcher.pid)
    launcher.kill()
    launcher.join()
    deadline = time.monotonic() + END_SECONDS
    while left := [rank for rank in ranks if is_alive(rank)]:
        assert time.monotonic() < deadline, f"ranks train on: {left}"
        time.sleep(0.01)
    assert len(ranks) == job.world_size


def trials(make_job: MakeJob, folder: Path, count: int, seed: int) -> None:
    draw, undisturbed = random.Random(seed), dict[object, object]()
    for number in range(count):
        ranks, sharding = layout = LAYOUTS[number % len(LAYOUTS)]
        place = folder / str(number)
        job = saving(make_job(world_size=ranks, sharding=sharding), place)
        if layout not in undisturbed:
            whole = folder / f"undisturbed-{number}"
            undisturbed[layout] = run_to_end(saving(job, whole), whole)
        Path(job.metrics).unlink(missing_ok=True)
        kill_launcher(job, draw)
        assert run_to_end(job, place) == undisturbed[layout], (number, layout)


def test_a_killed_launcher_leaves_no_ranks_and_changes_nothing(make_job: MakeJob, tmp_path: Path) -> None:
    trials(make_job, tmp_path, KILLED_LAUNCHER.change, KILLED_LAUNCHER.seed or 0)


@pytest.mark.trials
def test_no_killed_launcher_changes_anything(make_job: MakeJob, tmp_path: Path) -> None:
    trials(make_job, tmp_path, KILLED_LAUNCHER.nightly, (KILLED_LAUNCHER.seed or 0) + 1)
