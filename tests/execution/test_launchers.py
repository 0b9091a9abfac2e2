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
# The rank that was killed is not the one that torchrun saw first.
FOLLOWED, SEVERAL = report("0 1", "1 -9"), report("1 77", "2 3")


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
