"""What a launcher hands to an engine, and which rank it names of what was printed."""

from __future__ import annotations

import pytest

from tests.execution.placements import PlacementStandIn
from twinrun.execution.engine import PYTHON, Command
from twinrun.execution.launchers import Rendezvous, load_launcher
from twinrun.foundation.processes import last_lines


def report(first: str, *others: str) -> str:
    """Return what torchrun of PyTorch 2.7 prints of ranks that failed; each is `RANK STATUS`."""

    def one(place: int, text: str) -> str:
        rank, status = text.split()
        return (
            f"[{place}]:\n  time      : 2026-11-21_05:08:35\n  host      : localhost\n"
            f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {status} (pid: 17183)\n"
            "  error_file: <N/A>\n  traceback : To enable traceback see: https://pytorch.org/docs\n"
        )

    line, double = "-" * 60, "=" * 60
    known = "".join(one(place, text) for place, text in enumerate(others, 1)) or "  <NO_OTHER_FAILURES>\n"
    head = f"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n{double}\ntrain.py FAILED\n"
    cause = f"Root Cause (first observed failure):\n{one(0, first)}"
    return f"{head}{line}\nFailures:\n{known}{line}\n{cause}{double}\n"


LEFT, RAISED, KILLED = report("1 77"), report("2 1"), report("0 -9")
SRUN = "srun: error: node2: task {}\nsrun: error: node1: task 0: Terminated\n"
# The hostfile is of the allocation; a node of it may have left the network, or its name the resolver.
UNREACHED = """\
ssh: Could not resolve hostname node18: Name or service not known
--------------------------------------------------------------------------
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-node17-9961@0,0] on node node17
  Remote daemon: [prterun-node17-9961@0,1] on node node18
--------------------------------------------------------------------------
"""
MPI_SIGNALLED = """\
mpirun noticed that process rank 3 with PID 4711 on node node17
exited on signal 9 (Killed).
"""
MPI_LEFT = "  Process name: [prterun-node17-9961@1,2]\n  Exit code:    77\n"
# The launcher, what the commands of the nodes printed, and the rank that failed with its status.
ENDS = [
    *(("torchrun", [log], found) for log, found in ((LEFT, (1, 77)), (RAISED, (2, 1)), (KILLED, (0, -9)))),
    ("torchrun", [report("1 77", "2 3")], (1, 77)),
    # The rank that was killed is not the one that torchrun saw first.
    ("torchrun", [report("0 1", "1 -9")], (1, -9)),
    # Whichever node tells of the cause; and the last of several reports counts.
    *(("torchrun", logs, (0, -9)) for logs in ([RAISED, KILLED], [KILLED, RAISED], ["", KILLED])),
    *(("torchrun", logs, found) for logs, found in (([RAISED, ""], (2, 1)), ([LEFT + KILLED], (0, -9)))),
    # Without a whole report nobody is blamed.
    *(("torchrun", [log], None) for log in ("", "rank      : 3\nexitcode  : 1\n")),
    *(("torchrun", [LEFT[: LEFT.index(end)]], None) for end in ("[0]:", "  exitcode")),
    ("srun", ["", SRUN.format("1: Killed")], (1, -9)),
    ("srun", [SRUN.format("1: Segmentation fault (core dumped)")], (1, -11)),
    ("srun", [SRUN.replace("task ", "tasks ").format("3-5: Exited with exit code 77")], (3, 77)),
    ("srun", ["srun: error: Unable to create step\n"], None),
    *(("mpirun", [log], found) for log, found in ((MPI_SIGNALLED, (3, -9)), (MPI_LEFT, (2, 77)))),
    ("mpirun", [UNREACHED], None),
]


@pytest.mark.parametrize(("launcher", "logs", "found"), ENDS)
def test_the_rank_that_failed_first_is_named(
    launcher: str, logs: list[str], found: tuple[int, int] | None
) -> None:
    assert load_launcher(launcher).culprit(logs) == found
    assert "on node node18" in last_lines(UNREACHED)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_ranks_of_a_node_are_started_by_one_argument_list(nodes: int) -> None:
    script = Command(arguments=(PYTHON, "/in/train.py", "--job", "/out/job.json"), variables={})
    meeting = Rendezvous(first_node="node17", port="29400", id="a1b2", logs="/out/log")
    placement = PlacementStandIn(nodes=nodes, devices_per_node=2)
    found = load_launcher("torchrun").render(script, meeting, placement=placement, node="0", cores=8)
    assert found.variables["OMP_NUM_THREADS"] == "8"
    assert found.variables.get("GLOO_SOCKET_IFNAME") == ("lo" if nodes == 1 else None)
    assert found.reaches_nodes == (nodes > 1)
    assert nodes > 1 or found.arguments == (
        *(PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--log-dir", "/out/log", "--redirects", "3", "/in/train.py", "--job", "/out/job.json"),
    )
