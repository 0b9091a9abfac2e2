"""torchrun on this machine."""

from __future__ import annotations

import re
import signal

from twinrun.engine import PYTHON, Command
from twinrun.errors import MachineError
from twinrun.job import BenchPlan, Plan
from twinrun.sizing import Place
from twinrun.training import OUT_OF_MEMORY

_FAILURE = re.compile(r"^\s*rank\s*: (\d+).*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)
_FAILURES = "\nFailures:\n"
_ROOT_CAUSE = "Root Cause (first observed failure):"


def unusable(plan: Plan | BenchPlan) -> str | None:
    """Return why these points cannot be started on this machine alone, or None."""
    nodes = max(point.nodes for point in plan.points)
    return f"the plan has points of up to {nodes} nodes" if nodes > 1 else None


def render(plan: Plan | BenchPlan, point: Place, *, script: str, job: str, logs: str, cores: int) -> Command:
    """Return the command that starts the ranks of `point`.

    Args:
        script: the recipe's script, as the ranks see it.
        job: the job file, as the ranks see it.
        logs: folder for a log of each rank, as the ranks see it.
        cores: CPU cores that the ranks share.

    Raises:
        MachineError: the point needs more than one node.
    """
    if point.nodes > 1:
        raise MachineError(
            "the local launcher starts one node",
            place="--launcher local",
            found=f"{point.id} needs {point.nodes} nodes",
            hint="print the plan with --dry; launchers for clusters come with their recipes",
        )
    ranks = point.world_size
    return Command(
        arguments=(
            PYTHON,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "--log-dir",
            logs,
            "--redirects",
            "3",
            script,
            "--job",
            job,
        ),
        variables={
            "OMP_NUM_THREADS": str(max(1, cores // ranks)),
            # Threads that spin while they wait take the cores from whatever else runs here: with two busy
            # processes beside it, one CPU rank took 2.2 s a step instead of 0.37.
            "OMP_WAIT_POLICY": "PASSIVE",
            # One machine: rendezvous must not depend on how the host name resolves.
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )


def culprit(log: str) -> tuple[int, int] | None:
    """Return the rank that failed and its exit status, as torchrun's last report tells them.

    Ranks that lose a peer fail as well, and may be seen first: a rank that was killed, or that ran
    out of memory, is the cause whatever torchrun calls one.
    """
    _, found, report = log.rpartition(_FAILURES)
    others, cause, first = report.partition(_ROOT_CAUSE)
    ranks = [*_told_ranks(first), *_told_ranks(others)]
    if not found or not cause or not _told_ranks(first):
        return None
    return next((told for told in ranks if _is_cause(told[1])), ranks[0])


def _told_ranks(report: str) -> list[tuple[int, int]]:
    """Return rank and exit status of each failure in a part of a report."""
    return [(int(rank), int(status)) for rank, status in _FAILURE.findall(report)]


def _is_cause(status: int) -> bool:
    """Say whether a rank ends like this by itself; torchrun ends the others with SIGTERM."""
    return status == OUT_OF_MEMORY or (status < 0 and status != -signal.SIGTERM)
