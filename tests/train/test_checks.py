"""A recipe's checks in real processes: outcomes of every scope, timeouts, and ranks that find each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.train.small import ROOT, launch_by_torchrun
from twinrun.foundation.manifest import load_json
from twinrun.protocol.checks import CheckLine, ChecksJob, ChecksResult
from twinrun.protocol.measurements import Check

SCRIPT = """
import os, subprocess, sys, time
from twinrun.train.checks import CheckError, main

def good(job):
    print("looked at", job.point)
    return "it is there"

def bad(job):
    raise CheckError("the link is down", remedy="reseat the cable")

def bad_on_1(job):
    if os.environ["RANK"] == "1":
        bad(job)

def broken(job):
    raise ValueError("no such file")

def crash(job):
    os.abort()

def leave(job):
    sys.exit(3)

def hang(job):
    child = subprocess.Popen(["sleep", "300"])
    print("sleeps in", child.pid, flush=True)
    time.sleep(300)

def hang_on_0(job):
    hang(job) if os.environ["RANK"] == "0" else bad(job)

def slow_on_0(job):
    time.sleep(1.5 if os.environ["RANK"] == "0" else 0)

def together(job):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if total.item() != job.world_size:
        raise CheckError(f"the sum is {total.item()}")

names = {"slow-on-0": slow_on_0, "hang-on-0": hang_on_0, "bad-on-1": bad_on_1, "together-again": together,
         "good-together": good}
for one in (good, bad, broken, crash, leave, hang, together):
    names[one.__name__] = one
if __name__ == "__main__":
    main(names)
"""


def job_of(folder: Path, checks: Sequence[str], *, world_size: int = 1, timeout: float = 30.0) -> ChecksJob:
    """Return a job of checks written `id/scope`; scope `device` may be left out."""
    specs = [
        {"id": name, "title": name, "scope": scope or "device", "timeout": timeout}
        for name, _, scope in (one.partition("/") for one in checks)
    ]
    return ChecksJob.model_validate(
        {
            "recipe": "small",
            "point": "ranks",
            "world_size": world_size,
            "accelerator": False,
            "out": str(folder),
            "metrics": str(folder / "metrics.jsonl"),
            "attempt": "2",
            "checks": tuple(specs),
        }
    )


def command(job: ChecksJob, *, first: str = "") -> list[str]:
    """Return the command of one rank of `job`, its script beside a torch that cannot be imported.

    Args:
        first: what the script does before all else, such as to wait less.
    """
    folder = Path(job.out)
    (folder / "checks.py").write_text(f"{first}\n{SCRIPT}")
    (folder / "torch.py").write_text("raise ImportError('not installed here')")
    (folder / "job.json").write_text(job.model_dump_json())
    return [sys.executable, str(folder / "checks.py"), "--job", str(folder / "job.json")]


def variables(folder: Path, rank: int = 0, world_size: int = 1) -> dict[str, str]:
    """Return the environment of a rank; `folder` has a torch that cannot be imported."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }


def run(job: ChecksJob, *, first: str = "") -> list[Check]:
    """Run all ranks of `job` without torch; return the outcomes, which the metrics have as well."""
    arguments = command(job, first=first)
    ranks = [
        subprocess.Popen(
            arguments, env=variables(Path(job.out), rank, job.world_size), stdout=subprocess.PIPE
        )
        for rank in range(job.world_size)
    ]
    for rank in ranks:
        rank.communicate(timeout=60)
        assert rank.returncode == 0
    result = load_json(Path(job.out) / "result.json", ChecksResult)
    lines = Path(job.metrics).read_text().splitlines()
    assert tuple(CheckLine.model_validate_json(line).check for line in lines) == result.checks
    assert {CheckLine.model_validate_json(line).attempt for line in lines} == {"2"}
    assert "torch" not in result.libraries
    assert sorted(path.name for path in (Path(job.out) / "ranks").iterdir()) == [
        f"{rank}.json" for rank in range(job.world_size)
    ]
    return list(result.checks)


def test_a_check_passes_fails_or_finds_out_nothing(tmp_path: Path) -> None:
    found = run(job_of(tmp_path, ["good", "bad", "broken", "crash", "leave"]))
    assert [(one.id, one.outcome, one.reason) for one in found] == [
        ("good", "pass", "it is there"),
        ("bad", "fail", "the link is down"),
        ("broken", "unknown", "ValueError: no such file"),
        ("crash", "unknown", "ended by SIGABRT"),
        ("leave", "unknown", "SystemExit: 3"),
    ]
    assert [one.remedy for one in found] == [None, "reseat the cable", None, None, None]
    assert all(one.seconds is not None for one in found)


def test_a_check_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    job = job_of(tmp_path, ["hang", "good"], timeout=0.8)
    done = subprocess.run(
        command(job), env=variables(tmp_path), capture_output=True, text=True, timeout=60, check=True
    )
    hung, good = load_json(tmp_path / "result.json", ChecksResult).checks
    assert (hung.outcome, hung.reason) == ("fail", "timed out after 0.8 s")
    assert good.outcome == "pass"
    assert ends(int(done.stdout.split("sleeps in ")[1].split()[0]))


def test_a_rank_that_is_stopped_stops_its_check(tmp_path: Path) -> None:
    job = job_of(tmp_path, ["hang"])
    with subprocess.Popen(command(job), env=variables(tmp_path), stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        process = int(rank.stdout.readline().split()[-1])
        rank.terminate()
        assert rank.wait(timeout=10) == 128 + signal.SIGTERM
    assert ends(process)


def ends(process: int) -> bool:
    """Say whether `process` is gone within seconds; one that only waits to be reaped is."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_each_scope_has_its_ranks_and_its_place(tmp_path: Path) -> None:
    host = os.uname().nodename
    checks = ["good", "bad/node", "bad-on-1/allocation", "bad-on-1"]
    found = run(job_of(tmp_path, checks, world_size=2))
    assert [(one.id, one.place, one.outcome) for one in found] == [
        ("good", f"{host}, device 0", "pass"),
        ("good", f"{host}, device 1", "pass"),
        ("bad", host, "fail"),
        ("bad-on-1", "allocation", "fail"),
        ("bad-on-1", f"{host}, device 0", "pass"),
        ("bad-on-1", f"{host}, device 1", "fail"),
    ]
    assert (found[3].reason, found[3].remedy) == ("rank 1: the link is down", "reseat the cable")


def test_a_rank_does_not_wait_for_one_that_gave_up(tmp_path: Path) -> None:
    job = job_of(tmp_path, ["hang-on-0/allocation", "good/node"], world_size=2, timeout=50)
    found, good = run(job, first="import twinrun.train.checks as c; c.OTHERS_SECONDS = 1.0")
    assert (found.outcome, found.reason) == ("fail", "rank 1: the link is down")
    assert found.seconds is not None
    assert 1.0 <= found.seconds < 30
    assert good.outcome == "pass"


@pytest.mark.needs("torch")
def test_all_ranks_together_reduce_twice_under_torchrun(tmp_path: Path) -> None:
    """A slow rank costs the others none of their time together, nor does the store of the check before."""
    checks = ["slow-on-0", "together/allocation", "together-again/allocation"]
    job = job_of(tmp_path, checks, world_size=2)
    command(job)
    (tmp_path / "torch.py").unlink()
    ended = launch_by_torchrun(tmp_path / "checks.py", job)
    assert ended.returncode == 0, ended.stderr
    result = load_json(tmp_path / "result.json", ChecksResult)
    assert [one.outcome for one in result.checks] == ["pass"] * 4, result.checks
    assert "torch" in result.libraries


def test_a_rank_that_stays_away_is_unknown(tmp_path: Path) -> None:
    job = job_of(tmp_path, ["good", "good-together/allocation"], world_size=2, timeout=0.5)
    arguments = command(job, first="import twinrun.train.checks as o; o.GRACE_SECONDS = 0.1")
    subprocess.run(arguments, env=variables(tmp_path, 0, 2), timeout=60, check=True)
    checks = load_json(tmp_path / "result.json", ChecksResult).checks
    assert [(one.outcome, one.place) for one in checks] == [
        ("pass", f"{os.uname().nodename}, device 0"),
        ("unknown", "rank 1"),
        ("unknown", "allocation"),
    ]
    assert checks[2].reason == "rank 0: not run: without rank 1; rank 1: this rank reported nothing"
