"""torchrun: one agent a node, which starts the node's ranks."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence

from twinrun.execution.engine import PYTHON, Command, NodeCommand
from twinrun.execution.launchers import Culprit, RankPlacement, Rendezvous, node_logs, thread_variables
from twinrun.execution.task import Abilities
from twinrun.protocol.job import OUT_OF_MEMORY

IDENTITY = None
_FAILURE = re.compile(r"^\s*rank\s*: (\d+).*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)
_FAILURES = "\nFailures:\n"
_ROOT_CAUSE = "Root Cause (first observed failure):"


def unusable(abilities: Abilities) -> str | None:
    """Return None: an agent starts wherever a command does."""
    return None


def render(
    command: Command,
    *,
    placement: RankPlacement,
    node: str,
    rendezvous: Rendezvous,
    logs: str,
    cores: int,
    in_stack: Callable[[Command], NodeCommand],
) -> NodeCommand:
    """Return the agent of one node; it is a program of the stack."""
    assert command.arguments[0] == PYTHON
    alone = placement.nodes == 1
    agent = (
        *(PYTHON, "-m", "torch.distributed.run"),
        *(("--standalone",) if alone else _meeting(placement, node, rendezvous)),
        *("--nproc-per-node", str(placement.devices_per_node)),
        *("--log-dir", node_logs(logs, placement=placement, node=node), "--redirects", "3"),
        *command.arguments[1:],
    )
    variables = {
        **thread_variables(placement, cores),
        # One machine: rendezvous must not depend on how the host name resolves.
        **({"GLOO_SOCKET_IFNAME": "lo"} if alone else {}),
        **command.variables,
    }
    update = {"arguments": agent, "variables": variables, "reaches_nodes": not alone}
    return in_stack(command.model_copy(update=update))


def starter(placement: RankPlacement, *, cores: int) -> tuple[str, ...]:
    """Return nothing: every node starts its agent."""
    return ()


def culprit(logs: Sequence[str]) -> Culprit | None:
    """Return the rank that failed and its exit status, as the last report of each agent tells them.

    Ranks that lose a peer fail as well, and may be seen first: a rank that was killed, or that ran
    out of memory, is the cause whatever torchrun calls one.
    """
    found = [failure for log in logs for failure in _reported(log)]
    return next((failure for failure in found if _is_cause(failure.status)), next(iter(found), None))


def _meeting(placement: RankPlacement, node: str, rendezvous: Rendezvous) -> tuple[str, ...]:
    """Return how agents find each other; `static` keeps ranks in the order of the nodes, `c10d` does not."""
    return (
        *("--nnodes", str(placement.nodes), "--node-rank", node),
        *("--rdzv-backend", "static", "--rdzv-id", rendezvous.id),
        *("--rdzv-endpoint", f"{rendezvous.first_node}:{rendezvous.port}"),
    )


def _reported(log: str) -> list[Culprit]:
    """Return the failures of the last report in `log`, torchrun's first cause before the others."""
    _, found, report = log.rpartition(_FAILURES)
    others, cause, first = report.partition(_ROOT_CAUSE)
    causes = _failures(first)
    return [*causes, *_failures(others)] if found and cause and causes else []


def _failures(report: str) -> list[Culprit]:
    return [Culprit(int(rank), int(status)) for rank, status in _FAILURE.findall(report)]


def _is_cause(status: int) -> bool:
    """Say whether a rank ends like this by itself; torchrun ends the others with SIGTERM."""
    return status == OUT_OF_MEMORY or (status < 0 and status != -signal.SIGTERM)
