"""Which rank is named when a run hangs or a machine falls silent."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.execution.fake_engine import torchrun_report
from tests.execution.placements import PlacementStandIn
from twinrun.execution.engine import log_folder, point_folder
from twinrun.execution.failures import Pulses, failure_of, hang
from twinrun.execution.launchers import load_launcher
from twinrun.foundation.errors import MachineError, RunError
from twinrun.foundation.files import write_atomically
from twinrun.protocol.job import REFUSED
from twinrun.protocol.signals import PULSE as FOLDER
from twinrun.protocol.signals import RankState

TIMEOUT = """Timeout (0:00:10)!
Thread 0x00007f (most recent call first):
  File "threading.py", line 331 in wait
Thread 0x00007e (most recent call first):
  File "train.py", line 7 in forward
"""


def state(rank: int, **known: object) -> RankState:
    state = {"step": 12, "operation": "forward", "since": 100.0, "limit": 10.2, "reaches_first": True}
    return RankState.model_validate(
        {"rank": rank, "host": f"node{rank // 2}", "pid": 4000 + rank} | state | known
    )


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([state(0), state(1, quiet=12)], "rank 1 on node0, pid 4001, .*; its process was stopped"),
        (
            [state(0), state(1), state(2, reaches_first=False)],
            "rank 2 on node1, .*; its machine does not reach that of rank 0",
        ),
        (
            [state(0), *(state(rank, reaches_first=False) for rank in (2, 4))],
            "rank 0 on node0, .*; its machine is not reached from node1, node2",
        ),
        ([state(0), state(1, step=11), state(2)], "rank 1 .* at step 11: forward; it is the first of 3"),
        ([state(0), state(1), state(2, since=99.0)], "rank 2 .*; it is the first of 3 that fell silent"),
    ],
)
def test_the_rank_that_the_others_waited_for_is_named(
    tmp_path: Path, states: list[RankState], expected: str
) -> None:
    placement = PlacementStandIn(id="nodes=2", devices_per_node=3)
    for rank in range(3):
        log = tmp_path / str(rank) / "stderr.log"
        log.parent.mkdir()
        log.write_text(TIMEOUT)
    error = hang(states, point="nodes=2", logs=tmp_path, placement=placement)
    assert error is not None
    assert error.message == "the ranks made no progress for 10 s and were killed"
    assert re.search(expected, str(error.found)), error.found
    assert str(error.found).endswith('; in "train.py", line 7 in forward')
    ended = [state(0), state(1, end="done"), state(2, quiet=33)]
    assert hang(ended, point="nodes=2", logs=tmp_path / "nowhere") is None


# Writes its pulse every second, as ranks do, and its job stands on its command line as theirs does.
PULSE = """
import json, os, pathlib, sys, time
file = pathlib.Path(sys.argv[2])
while True:
    state = {"rank": 1, "host": "here", "pid": os.getpid(), "step": 3, "operation": "forward"}
    file.with_suffix(".part").write_text(json.dumps(state))
    file.with_suffix(".part").rename(file)
    time.sleep(0.1)
"""


def followed(pulses: Pulses, times: int) -> None:
    for _ in range(times):
        pulses.demand_fresh()
        time.sleep(0.1)


def test_a_rank_that_is_stopped_is_named_from_its_old_pulse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinrun.execution.failures._STALE_SECONDS", 1.5)
    monkeypatch.setattr("twinrun.execution.failures._LOOK_SECONDS", 0)
    file = tmp_path / FOLDER / "1.json"
    file.parent.mkdir()
    pulses = Pulses(tmp_path, point="devices=2", here=True)
    with subprocess.Popen([sys.executable, "-c", PULSE, "--job", str(file)]) as rank:
        try:
            followed(pulses, 25)
            rank.send_signal(signal.SIGSTOP)
            with pytest.raises(RunError, match="rank 1 on here has said nothing for 2 s") as caught:
                followed(pulses, 100)
            assert "at step 3: forward; its process was stopped" in str(caught.value.found)
        finally:
            rank.kill()


@pytest.mark.parametrize("others", [False, True])
def test_a_machine_that_is_gone_is_named_while_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, others: bool
) -> None:
    """A file system that hangs shows nobody's pulse, and is no rank's fault."""
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    pulses = Pulses(tmp_path, point="nodes=2", here=False)
    for rank in range(2):
        write_atomically(tmp_path / FOLDER / f"{rank}.json", state(rank).model_dump_json())
    pulses.demand_fresh()
    clock[0] += 50
    if not others:
        pulses.demand_fresh()
        return
    write_atomically(tmp_path / FOLDER / "0.json", state(0, since=7.0).model_dump_json())
    with pytest.raises(RunError, match="rank 1 on node0 has said nothing for 50 s"):
        pulses.demand_fresh()


def test_an_agent_that_is_killed_is_named_with_its_node(tmp_path: Path) -> None:
    log = log_folder(tmp_path, "nodes=2") / "launcher.log"
    write_atomically(log, "srun: error: node7: task 1: Killed\n")
    for rank in range(2):
        words = state(rank).model_dump_json()
        write_atomically(point_folder(tmp_path, "nodes=2") / FOLDER / f"{rank}.json", words)
    placement, culprit = PlacementStandIn(id="nodes=2", nodes=2), load_launcher("torchrun").culprit
    error = failure_of(placement, tmp_path, [log], culprit=culprit, status=137)
    assert "the agent of node7: Killed; rank 0 on node0" in str(error)


@pytest.mark.parametrize(
    ("status", "message", "hint"),
    [
        (-9, "signal 9", "memory may have run out; after mending the cause, --resume goes on"),
        (1, "exit status 1", "after mending the cause, --resume goes on"),
        (REFUSED, "exit status 78", "--resume goes on"),
    ],
)
def test_how_a_rank_ended_is_told(tmp_path: Path, status: int, message: str, hint: str) -> None:
    log = log_folder(tmp_path, "devices=2") / "launcher.log"
    write_atomically(log, torchrun_report(1, status))
    placement = PlacementStandIn(id="devices=2", devices_per_node=2)
    culprit = load_launcher("torchrun").culprit
    error = failure_of(placement, tmp_path, [log], culprit=culprit, status=1)
    assert error is not None
    assert error.message == f"rank 1 of 2 failed with {message}"
    assert hint in str(error.hint)
    # A rank whose machine refused something, such as a full disk, is an error of the machine.
    assert isinstance(error, MachineError) == (status == REFUSED)
    silent = failure_of(placement, tmp_path / "nowhere", [], culprit=culprit, status=1)
    assert silent is not None
    assert silent.found == "the log is empty"
