"""A rank that makes no progress ends itself with its traceback, and one that works or ends is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.ranks import environment
from twinrun.foundation.manifest import load_json
from twinrun.protocol.job import Job
from twinrun.protocol.signals import PULSE, RankState
from twinrun.train.rank import STARTED_FILE

SECONDS = 60
# Two steps, of which the second hangs where it does what it has done before.
HANGS = """
from twinrun.train import rank

def hang():
    {hang}

def work(job):
    for step in (1, 2):
        rank.beat("forward", step=step)
        if step == 2:
            print("there", flush=True)
            hang()
        rank.beat("backward")
    raise SystemExit(7)

from twinrun.protocol.job import Job
rank.run(work, Job)
"""
HELD = "import ctypes, time; time.sleep(1.2); ctypes.PyDLL(None).sleep(600)"
ALONE = """import torch.distributed as dist, torch
    dist.init_process_group("gloo", store=dist.PrefixStore("x", dist.HashStore()), rank=0, world_size=2)"""


def job(folder: Path, **fields: object) -> Job:
    common = {"recipe": "small", "point": "small", "world_size": 1, "accelerator": False, "attempt": "1"}
    files = {"out": str(folder), "metrics": str(folder / "metrics.jsonl")}
    return Job.model_validate(common | files | fields)


def start(folder: Path, text: str, **fields: object) -> subprocess.Popen[str]:
    (folder / "job.json").write_text(job(folder, **fields).model_dump_json())
    script = folder / "script.py"
    script.write_text(text)
    command = [sys.executable, str(script), "--job", str(folder / "job.json")]
    variables = environment() | {
        "RANK": "3",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",
    }
    return subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )


def words(folder: Path, rank: int = 3) -> RankState:
    return load_json(folder / PULSE / f"{rank}.json", RankState)


@pytest.mark.parametrize(
    ("hang", "place"),
    [
        ("import time; time.sleep(600)", "in hang"),
        (HELD, "in hang"),
        ("import slow", "slow.py"),
        (ALONE, "in init_process_group"),
    ],
    ids=["python", "lock held", "import", "without a peer"],
)
def test_a_rank_that_hangs_ends_with_its_traceback(tmp_path: Path, hang: str, place: str) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    with start(tmp_path, HANGS.format(hang=hang), watchdog_seconds=2.5) as rank:
        _, said = rank.communicate(timeout=SECONDS)
    assert rank.returncode == 1
    assert "Timeout (0:00:02" in said
    assert place in said
    found = words(tmp_path)
    assert (found.rank, found.pid, found.step) == (3, rank.pid, 2)
    if hang != HELD:
        # Port 9 refuses, and a machine that refuses is reached.
        assert (found.operation, found.limit, found.reaches_first) == ("forward", 2.5, True)


def test_a_rank_that_is_stopped_writes_no_more(tmp_path: Path) -> None:
    with start(tmp_path, HANGS.format(hang="import time; time.sleep(600)")) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "there\n"
        time.sleep(1.5)
        os.kill(rank.pid, signal.SIGSTOP)
        time.sleep(0.2)
        before = (tmp_path / PULSE / "3.json").stat().st_mtime_ns
        time.sleep(2)
        assert (tmp_path / PULSE / "3.json").stat().st_mtime_ns == before
        rank.kill()
    found = words(tmp_path)
    assert (found.step, found.operation, found.end) == (2, "forward", None)


def test_a_rank_that_ends_well_says_so(tmp_path: Path) -> None:
    done = (
        "from twinrun.protocol.job import Result\n    return Result(point='a', device_name='', libraries={})"
    )
    text = HANGS.format(hang="pass").replace("raise SystemExit(7)", done)
    text = text.replace("rank.run(", "import os; os.environ['RANK'] = '0'; rank.run(")
    with start(tmp_path, text, watchdog_seconds=0.5) as rank:
        assert rank.wait(SECONDS) == 0
    assert (words(tmp_path, 0).operation, words(tmp_path, 0).end) == ("backward", "done")


def test_a_rank_is_watched_before_it_reads_or_writes_a_file(tmp_path: Path) -> None:
    """Its metrics are a pipe that nobody writes to, so that the first rank hangs where it starts over."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    # Lines are read where an earlier start may have written some.
    (tmp_path / STARTED_FILE).touch()
    text = "import os; os.environ['RANK'] = '0'\n" + HANGS.format(hang="pass")
    with start(tmp_path, text) as rank:
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / PULSE / "0.json").exists():
            assert rank.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = words(tmp_path, 0)
        assert (found.pid, found.operation, found.end) == (rank.pid, "starts", None)
        assert not (tmp_path / "ranks").exists()
        rank.kill()
