"""A rank that hangs is killed by the process beside it, and one that works, or ends, is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.ranks import environment
from twinrun.foundation.manifest import load_json
from twinrun.protocol.job import Job
from twinrun.protocol.pulse import FOLDER, RankState, WatchedRank
from twinrun.train.job_files import STARTED_FILE
from twinrun.train.liveness import FIRST_SECONDS, FLOOR_SECONDS, Watchdog

SECONDS = 30
# Two steps, of which the second hangs where it does what it has done before.
HANGS = """
import sys, time
from twinrun.protocol.job import Job
from twinrun.train import liveness
job = Job.model_validate_json(sys.argv[1])
liveness.watch(job)
for step in (1, 2):
    liveness.beat("forward", step=step)
    if step == 2:
        print("there", flush=True)
        {hang}
    liveness.beat("backward")
liveness.end()
"""


def job(folder: Path, **fields: object) -> Job:
    common = {"recipe": "small", "point": "small", "world_size": 1, "accelerator": False, "attempt": "1"}
    files = {"out": str(folder), "metrics": str(folder / "metrics.jsonl")}
    return Job.model_validate(common | files | fields)


def watched(folder: Path, *, seconds: float | None = None) -> WatchedRank:
    return WatchedRank(pid=1, out=str(folder), world_size=1, watchdog_seconds=seconds)


def start(folder: Path, hang: str, **fields: object) -> subprocess.Popen[str]:
    variables = environment() | {"RANK": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    command = [sys.executable, "-c", HANGS.format(hang=hang), job(folder, **fields).model_dump_json()]
    started = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "there\n"
    return started


def last_words(folder: Path, end: str) -> RankState:
    deadline = time.monotonic() + SECONDS
    file = folder / FOLDER / "3.json"
    while not file.exists() or load_json(file, RankState).end != end:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return load_json(file, RankState)


@pytest.mark.parametrize("halted", [False, True], ids=["sleeps", "stopped"])
def test_a_rank_that_hangs_is_killed_and_says_where(tmp_path: Path, *, halted: bool) -> None:
    with start(tmp_path, "time.sleep(600)", watchdog_seconds=0.5) as rank:
        if halted:
            os.kill(rank.pid, signal.SIGSTOP)
        assert rank.wait(SECONDS) == -signal.SIGKILL
    found = last_words(tmp_path, "hung")
    assert (found.rank, found.pid, found.step, found.operation) == (3, rank.pid, 2, "forward")
    assert 0.5 < found.silent_seconds < 5
    assert found.process.startswith("T" if halted else "S")
    # Port 9 refuses, and a machine that refuses is reached.
    assert found.reaches_first is True


def test_a_rank_that_is_killed_leaves_its_last_words(tmp_path: Path) -> None:
    with start(tmp_path, "time.sleep(600)") as rank:
        rank.kill()
    found = last_words(tmp_path, "lost")
    assert (found.step, found.operation, found.silent_seconds) == (2, "forward", 0)


def test_a_rank_that_ends_well_is_left_alone(tmp_path: Path) -> None:
    with start(tmp_path, "pass", watchdog_seconds=0.2) as rank:
        assert rank.wait(SECONDS) == 0
    assert last_words(tmp_path, "done").operation == "backward"


# Needs torch, as all ranks do.
RANK = """
from twinrun.protocol.job import Job
from twinrun.train import worker
worker.run(lambda job: None, Job)
"""


def test_a_rank_is_watched_before_it_reads_or_writes_a_file(tmp_path: Path) -> None:
    """Its metrics are a pipe that nobody writes to, so that the first rank hangs where it starts over."""
    pytest.importorskip("torch")
    watched_job = job(tmp_path)
    os.mkfifo(watched_job.metrics)
    # Lines are read where an earlier start may have written some.
    (Path(watched_job.out) / STARTED_FILE).touch()
    (tmp_path / "job.json").write_text(watched_job.model_dump_json())
    command = [sys.executable, "-c", RANK, "--job", str(tmp_path / "job.json")]
    file = tmp_path / FOLDER / "0.json"
    with subprocess.Popen(command, env=environment()) as rank:
        deadline = time.monotonic() + SECONDS
        while not file.exists():
            assert rank.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        state = load_json(file, RankState)
        assert (state.pid, state.operation, state.end) == (rank.pid, "starts", None)
        assert not (tmp_path / "ranks").exists()
        rank.kill()


def test_a_file_system_that_hangs_does_not_keep_the_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    written: list[str] = []

    def hang(_file: Path, text: str) -> None:
        goes_on.wait(SECONDS)
        written.append(text)

    monkeypatch.setattr("twinrun.train.liveness.write_atomically", hang)
    dog = Watchdog(watched(tmp_path), reader=0)
    began = time.monotonic()
    for _ in range(3):
        dog._write()
    dog._write_last(patience=0.1)
    assert time.monotonic() - began < 5
    assert not written
    goes_on.set()
    dog._write_last(patience=None)
    assert len(written) == 2


def test_limits_are_learned_from_what_was_done_before(tmp_path: Path) -> None:
    watchdog = Watchdog(watched(tmp_path), reader=0)
    assert watchdog.limit() == FIRST_SECONDS
    watchdog._hear(["1\tforward\n"])
    assert watchdog.limit() == FIRST_SECONDS
    for spent in (20.0, 40.0, 30.0):
        watchdog._silent = spent
        watchdog._hear(["1\tforward\n"])
    assert watchdog.limit() == 10 * 30.0
    watchdog._hear(["1\tbackward\n", "2\tforward\n", "2\tbackward\n"])
    assert watchdog.limit() == FLOOR_SECONDS
    watchdog = Watchdog(watched(tmp_path, seconds=7), reader=0)
    assert watchdog.limit() == FIRST_SECONDS
    watchdog._hear(["1\tforward\n", "2\tforward\n"])
    assert watchdog.limit() == 7
