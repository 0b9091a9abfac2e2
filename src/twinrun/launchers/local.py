"""torchrun on this machine."""

from __future__ import annotations

import re

from twinrun.engine import PYTHON, Command
from twinrun.errors import MachineError
from twinrun.job import Plan
from twinrun.sizing import Point

_RANK = re.compile(r"^\s*rank\s*: (\d+)", re.MULTILINE)
_EXIT = re.compile(r"^\s*exitcode\s*: (-?\d+)", re.MULTILINE)
_ROOT_CAUSE = "Root Cause (first observed failure):"


def unusable(plan: Plan) -> str | None:
    """Return why these points cannot be started on this machine alone, or None."""
    nodes = max(point.nodes for point in plan.points)
    return f"the plan has points of up to {nodes} nodes" if nodes > 1 else None


def render(plan: Plan, point: Point, *, script: str, job: str, logs: str, cores: int) -> Command:
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
    """Return the rank that failed first and its exit status, as torchrun's report names them."""
    _, found, report = log.rpartition(_ROOT_CAUSE)
    rank, status = _RANK.search(report), _EXIT.search(report)
    return (int(rank[1]), int(status[1])) if found and rank and status else None
