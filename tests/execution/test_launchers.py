# ruff: noqa: E501, W291, W293 - what torchrun printed is kept as it is
from __future__ import annotations

import pytest

from tests.execution.placements import PlacementStandIn
from twinrun.execution.engine import PYTHON, Command
from twinrun.execution.launchers import Rendezvous, load_launcher
from twinrun.foundation.processes import last_lines

# What torchrun of PyTorch 2.7 printed for three ranks, shortened in the middle of the traceback. Rank 1
# left with status 77, rank 2 raised under @record, rank 0 was killed by the kernel.
LEFT = """\
W1121 05:08:35.429000 16671 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 17179 closing signal SIGTERM
W1121 05:08:35.430000 16671 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 17186 closing signal SIGTERM
E1121 05:08:35.432000 16671 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 77) local_rank: 1 (pid: 17183) of binary: /usr/bin/python
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_05:08:35
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 77 (pid: 17183)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
RAISED = """\
E1121 05:08:43.164000 16670 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 2 (pid: 17156) of binary: /usr/bin/python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
============================================================
raises.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_05:08:42
  host      : localhost
  rank      : 2 (local_rank: 2)
  exitcode  : 1 (pid: 17156)
  error_file: logs-raises/7a7b1862-da40-4ca4-976c-15bdb3b6ffbe_xs6bubjv/attempt_0/2/error.json
  traceback : Traceback (most recent call last):
    File "raises.py", line 6, in main
      raise ValueError("loss is not finite")
  ValueError: loss is not finite
  
============================================================
"""
KILLED = """\
E1121 05:08:34.778000 16669 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 0 (pid: 17133) of binary: /usr/bin/python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
======================================================
kills.py FAILED
------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_05:08:34
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 17133)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 17133
======================================================
"""


# The rank that was killed is not the one that torchrun saw first.
FOLLOWED = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
============================================================
both.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_05:48:03
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 29656)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 29656
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_05:48:03
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 29655)
  error_file: error.json
  traceback : Traceback (most recent call last):
    File "both.py", line 8, in main
      raise RuntimeError("Connection closed by peer")
  RuntimeError: Connection closed by peer
============================================================
"""


SEVERAL = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
============================================================
several.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_05:19:21
  host      : localhost
  rank      : 2 (local_rank: 2)
  exitcode  : 3 (pid: 23497)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_05:19:21
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 77 (pid: 23496)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


torchrun = load_launcher("torchrun")
SCRIPT = Command(arguments=(PYTHON, "/in/train.py", "--job", "/out/job.json"), variables={})
MEETING = Rendezvous(first_node="node17", port="29400", id="a1b2")


def rendered(placement: PlacementStandIn, *, node: int = 0, cores: int = 16) -> Command:
    """Return what torchrun hands to the engine."""
    words = {"node": str(node), "rendezvous": MEETING, "logs": "/out/log", "cores": cores}
    return torchrun.render(SCRIPT, placement=placement, **words)  # type: ignore[arg-type]


def test_the_ranks_of_one_node_are_started_by_one_argument_list() -> None:
    assert rendered(PlacementStandIn(devices_per_node=4)).arguments == (
        *(PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        *("--log-dir", "/out/log", "--redirects", "3", "/in/train.py", "--job", "/out/job.json"),
    )


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_rank_has_the_threads_of_its_cores(nodes: int) -> None:
    command = rendered(PlacementStandIn(nodes=nodes, devices_per_node=2), cores=8)
    assert command.variables["OMP_NUM_THREADS"] == "8"
    assert command.variables.get("GLOO_SOCKET_IFNAME") == ("lo" if nodes == 1 else None)
    assert command.reaches_nodes == (nodes > 1)


@pytest.mark.parametrize(
    ("log", "found"),
    [(LEFT, (1, 77)), (RAISED, (2, 1)), (KILLED, (0, -9)), (SEVERAL, (1, 77)), (FOLLOWED, (1, -9))],
)
def test_the_rank_that_failed_first_is_named(log: str, found: tuple[int, int]) -> None:
    assert torchrun.culprit([log]) == found


def test_the_cause_is_found_whichever_node_tells_of_it() -> None:
    for logs in ([RAISED, KILLED], [KILLED, RAISED], ["", KILLED]):
        assert torchrun.culprit(logs) == (0, -9)
    assert torchrun.culprit([RAISED, ""]) == (2, 1)


def test_the_last_of_several_reports_counts() -> None:
    assert torchrun.culprit([LEFT + KILLED]) == (0, -9)


# The hostfile is of the allocation; a node of it may have left the network, or its name the resolver.
UNREACHED = """\
ssh: Could not resolve hostname node18: Name or service not known
--------------------------------------------------------------------------
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-node17-9961@0,0] on node node17
  Remote daemon: [prterun-node17-9961@0,1] on node node18

This is usually due to either a failure of the TCP network
connection to the node, or possibly an internal failure of
the daemon itself. We cannot recover from this failure, and
therefore will terminate the job.
--------------------------------------------------------------------------
"""


def test_a_host_that_mpirun_does_not_reach_is_no_rank_and_is_shown() -> None:
    assert load_launcher("mpirun").culprit([UNREACHED]) is None
    assert "on node node18" in last_lines(UNREACHED)


@pytest.mark.parametrize(
    "log",
    ["", "rank      : 3\nexitcode  : 1\n", LEFT[: LEFT.index("[0]:")], LEFT[: LEFT.index("  exitcode")]],
)
def test_without_a_whole_report_nobody_is_blamed(log: str) -> None:
    assert torchrun.culprit([log]) is None
