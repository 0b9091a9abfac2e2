"""Which rank is named when a run hangs or a machine falls silent."""

from __future__ import annotations

import re
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
from twinrun.protocol.signals import PULSE, RankState

TIMEOUT = """Timeout (0:00:10)!
Thread 0x00007f (most recent call first):
  File "threading.py", line 331 in wait
Thread 0x00007e (most recent call first):
  File "train.py", line 7 in forward
"""
ALONE, TWO = PlacementStandIn(id="devices=3", devices_per_node=3), PlacementStandIn(id="nodes=2", nodes=2)


def state(rank: int, **known: object) -> RankState:
    state = {"step": 12, "operation": "forward", "since": 100.0, "limit": 10.2, "reaches_first": True}
    return RankState.model_validate(
        {"rank": rank, "host": f"node{rank // 2}", "pid": 4000 + rank} | state | known
    )


CUT = {"reaches_first": False}
HANGS = [
    ([state(0), state(1, quiet=12)], "rank 1 on node0, pid 4001, .*; its process was stopped"),
    ([state(0), state(1), state(2, **CUT)], "rank 2 on node1, .*; its machine does not reach that of rank 0"),
    (
        [state(0), *(state(rank, **CUT) for rank in (2, 4))],
        "rank 0 on node0, .*; its machine is not reached from node1, node2",
    ),
    ([state(0), state(1, step=11), state(2)], "rank 1 .* at step 11: forward; it is the first of 3"),
    ([state(0), state(1), state(2, since=99.0)], "rank 2 .*; it is the first of 3 that fell silent"),
]


@pytest.mark.parametrize(("states", "expected"), HANGS)
def test_the_rank_that_the_others_waited_for_is_named(
    tmp_path: Path, states: list[RankState], expected: str
) -> None:
    for rank in range(3):
        write_atomically(tmp_path / str(rank) / "stderr.log", TIMEOUT)
    error = hang(states, ALONE, tmp_path)
    assert error is not None
    assert error.message == "the ranks made no progress for 10 s and were killed"
    assert re.search(expected, str(error.found)), error.found
    assert str(error.found).endswith('; in "train.py", line 7 in forward')
    assert hang([state(0), state(1, end="done"), state(2, quiet=33)], ALONE, tmp_path / "nowhere") is None


@pytest.mark.parametrize(("others", "end"), [(False, None), (True, None), (True, "done")])
def test_who_is_stopped_or_gone_is_named_while_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, others: bool, end: str | None
) -> None:
    """A file system that hangs shows nobody's pulse, and is no rank's fault; who is done says no more."""
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    pulses = Pulses(tmp_path, point="nodes=2")
    for rank in range(2):
        text = state(rank, end=end).model_dump_json()
        write_atomically(tmp_path / PULSE / f"{rank}.json", text)
    pulses.demand_fresh()
    clock[0] += 50
    if others:
        text = state(0, since=7.0).model_dump_json()
        write_atomically(tmp_path / PULSE / "0.json", text)
    if not others or end:
        pulses.demand_fresh()
        return
    with pytest.raises(RunError, match="rank 1 on node0 has said nothing for 50 s") as caught:
        pulses.demand_fresh()
    assert "at step 12: forward; its process was stopped, or its machine is gone" in str(caught.value)


def test_an_agent_that_is_killed_is_named_with_its_node(tmp_path: Path) -> None:
    log = log_folder(tmp_path, TWO.id) / "launcher.log"
    write_atomically(log, "srun: error: node7: task 1: Killed\n")
    for rank in range(2):
        file = point_folder(tmp_path, TWO.id) / PULSE / f"{rank}.json"
        write_atomically(file, state(rank).model_dump_json())
    error = failure_of(TWO, tmp_path, [log], launcher=load_launcher("torchrun"), status=137)
    assert "the agent of node7: Killed; rank 0 on node0" in str(error)


@pytest.mark.parametrize(
    ("status", "message", "hint"),
    [
        (-9, "signal 9", "memory may have run out; after mending the cause, --resume goes on"),
        (-7, "signal 7: /dev/shm ran out; in a container --shm-size=8g", "--resume goes on"),
        (1, "exit status 1", "after mending the cause, --resume goes on"),
        (REFUSED, "exit status 78", "--resume goes on"),
    ],
)
def test_how_a_rank_ended_is_told(tmp_path: Path, status: int, message: str, hint: str) -> None:
    log, launcher = log_folder(tmp_path, ALONE.id) / "launcher.log", load_launcher("torchrun")
    write_atomically(log, torchrun_report(1, status))
    error = failure_of(ALONE, tmp_path, [log], launcher=launcher, status=1)
    assert error is not None
    assert error.message == f"rank 1 of 3 failed with {message}"
    assert hint in str(error.hint)
    # A rank whose machine refused something, such as a full disk, is an error of the machine.
    assert isinstance(error, MachineError) == (status == REFUSED)
    silent = failure_of(ALONE, tmp_path / "nowhere", [], launcher=launcher, status=1)
    assert silent is not None
    assert silent.found == "the log is empty"
