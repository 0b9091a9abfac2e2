"""Launchers, a class each: what starts a command once per rank or per node of a placement."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from twinrun.execution.engine import PYTHON, Command
from twinrun.execution.job_script import FIRST_NODE, HOSTS, LOCAL_RANK, NODE, RANK
from twinrun.foundation.errors import require_known
from twinrun.protocol.allocation import Placement
from twinrun.protocol.job import OUT_OF_MEMORY

# As a shell calls what ended a process.
_SIGNALS = {str(signal.strsignal(one)): int(one) for one in signal.valid_signals() if one < signal.SIGRTMIN}


class Rendezvous(NamedTuple):
    """Where and under which name the nodes of one start meet."""

    first_node: str
    """Name of the node with the first rank, as the others resolve it."""
    port: str
    """A number, or the variable of a script that has it."""
    id: str
    """Unlike that of every other start."""
    logs: str
    """Folder for a log of each rank, as the ranks see it."""


class Culprit(NamedTuple):
    """The rank that failed first."""

    rank: int
    status: int
    """Exit status; a negative one is a signal."""


class Launcher:
    """One that starts every rank itself, from the first node."""

    IDENTITY: tuple[str, str] | None = None
    """Variables with the rank of a process and its rank on its node, where the starter starts the ranks."""
    NEEDS: tuple[str, str] | None = None
    """The ability that a scheduler must have, and what is said of one without it."""
    STARTER: tuple[str, ...] = ()
    """Words that start a command for every rank from the first node; empty for one a node."""
    ENDED: re.Pattern[str]
    """Finds in the outputs of nodes a rank, and its `status` or `signal`."""

    def unusable(self, abilities: Sequence[str]) -> str | None:
        """Return why ranks cannot be started on what a scheduler with these abilities gives, or None."""
        return self.NEEDS[1] if self.NEEDS and self.NEEDS[0] not in abilities else None

    def starter(self, placement: Placement, *, cores: int) -> tuple[str, ...]:
        """Return the words of the starter for a placement.

        Args:
            cores: CPU cores of each rank.
        """
        told = {"ranks": placement.world_size, "nodes": placement.nodes, "each": placement.devices_per_node}
        return tuple(word.format(**told, cores=cores) for word in self.STARTER)

    def render(
        self, command: Command, meeting: Rendezvous, *, placement: Placement, node: str, cores: int
    ) -> Command:
        """Return what the stack runs on one node so that every rank of it runs `command`; pure.

        Args:
            node: place of the node among those of the allocation, or what stands for it.
            cores: CPU cores of each rank.
        """
        assert command.arguments[0] == PYTHON
        words, own = self.inside(placement, node, meeting)
        # Threads that spin while they wait take the cores from whatever else runs here: with two busy
        # processes beside it, one CPU rank took 2.2 s a step instead of 0.37.
        threads = {"OMP_NUM_THREADS": str(cores), "OMP_WAIT_POLICY": "PASSIVE"}
        return Command(
            arguments=(PYTHON, *words, *command.arguments[1:]),
            variables={**threads, **own, **command.variables},
            reaches_nodes=placement.nodes > 1,
        )

    def inside(
        self, placement: Placement, node: str, meeting: Rendezvous
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the words of the stack's Python before the command, and the variables of every rank."""
        return (), {
            "RANK": f"${RANK}",
            "LOCAL_RANK": f"${LOCAL_RANK}",
            "GROUP_RANK": f"${NODE}",
            "WORLD_SIZE": str(placement.world_size),
            "LOCAL_WORLD_SIZE": str(placement.devices_per_node),
            "MASTER_ADDR": meeting.first_node,
            "MASTER_PORT": meeting.port,
        }

    def culprit(self, logs: Sequence[str]) -> Culprit | None:
        """Return the rank that failed first, as the outputs of the nodes' commands name it.

        It is the first that the starter names; those that it ends for it are named later.
        """
        for found in filter(None, map(self.ENDED.search, logs)):
            rank, end = filter(None, found.groups())
            status = int(end) if end.isdecimal() else _SIGNALS[end]
            return Culprit(int(rank), -status if found.lastgroup == "signal" else status)
        return None


class Torchrun(Launcher):
    """One agent a node, which starts the node's ranks; it is a program of the stack."""

    ENDED = re.compile(r"^\s*rank\s*: (\d+).*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)

    def inside(
        self, placement: Placement, node: str, meeting: Rendezvous
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the agent of one node."""
        alone = placement.nodes == 1
        # `static` keeps ranks in the order of the nodes, `c10d` does not.
        agents = (
            *("--nnodes", str(placement.nodes), "--node-rank", node),
            *("--rdzv-backend", "static", "--rdzv-id", meeting.id),
            *("--rdzv-endpoint", f"{meeting.first_node}:{meeting.port}"),
        )
        words = (
            *("-m", "torch.distributed.run", *(("--standalone",) if alone else agents)),
            *("--nproc-per-node", str(placement.devices_per_node)),
            *("--log-dir", node_logs(meeting.logs, placement=placement, node=node), "--redirects", "3"),
        )
        # One machine: rendezvous must not depend on how the host name resolves.
        return words, {"GLOO_SOCKET_IFNAME": "lo"} if alone else {}

    def culprit(self, logs: Sequence[str]) -> Culprit | None:
        """Return the rank that failed and its exit status, as the last report of each agent tells them.

        Ranks that lose a peer fail as well, and may be seen first: a rank that was killed, or that ran
        out of memory, is the cause whatever torchrun calls one; the others it ends with SIGTERM.
        """
        found: list[Culprit] = []
        for log in logs:
            _, told, report = log.rpartition("\nFailures:\n")
            others, _, first = report.partition("Root Cause (first observed failure):")
            if told and (causes := self.ENDED.findall(first)):
                named = (*causes, *self.ENDED.findall(others))
                found += [Culprit(int(rank), int(status)) for rank, status in named]
        own = (one for one in found if one.status == OUT_OF_MEMORY or -signal.SIGTERM != one.status < 0)
        return next(own, next(iter(found), None))


class Srun(Launcher):
    """Slurm starts each rank itself."""

    IDENTITY = ("SLURM_PROCID", "SLURM_LOCALID")
    NEEDS = ("steps", "srun starts ranks where the scheduler is Slurm")
    STARTER = (
        *("srun", "--nodes={nodes}", "--ntasks={ranks}", "--ntasks-per-node={each}", "--distribution=block"),
        # Since Slurm 22.05 srun does not take the first from sbatch. Ranks bind themselves, each to the
        # cores beside its device.
        *("--cpus-per-task={cores}", "--cpu-bind=none"),
        # Tasks without a peer would wait for it until the time limit.
        *("--kill-on-bad-exit=1", "--input=none"),
    )
    ENDED = re.compile(
        r"^srun: error: .*?: tasks? (\d+)[\d,-]*: "
        rf"(?:Exited with exit code (?P<status>\d+)|(?P<signal>{'|'.join(map(re.escape, _SIGNALS))}))",
        re.MULTILINE,
    )


class Mpirun(Launcher):
    """mpirun of OpenMPI: its ranks meet as those of torchrun do."""

    IDENTITY = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    NEEDS = ("hosts", "mpirun starts ranks where a scheduler names the hosts of its job")
    # Those of a node side by side.
    STARTER = (
        *("mpirun", "--hostfile", f"${HOSTS}", "-n", "{ranks}", "--map-by", "ppr:{each}:node"),
        # Slurm starts its daemons. As root, which a user of containers may be, it wants to be told.
        *("--bind-to", "none", "--allow-run-as-root", "-x", "RUN", "-x", FIRST_NODE),
    )
    ENDED = re.compile(
        r"process rank (\d+) with PID \d+ (?s:.*?)\s+exited on\s+signal (?P<signal>\d+)"
        r"|^\s*Process name: \[.*?,(\d+)\]\s*\n\s*Exit code:\s+(?P<status>\d+)",
        re.MULTILINE,
    )


LAUNCHERS: dict[str, Launcher] = {"mpirun": Mpirun(), "srun": Srun(), "torchrun": Torchrun()}


def load_launcher(name: str) -> Launcher:
    """Return the launcher called `name`; raises InputError when there is none."""
    require_known(name, LAUNCHERS, "unknown launcher", place="--launcher")
    return LAUNCHERS[name]


def node_logs(logs: str, *, placement: Placement, node: str) -> str:
    """Return the folder for the logs of a node's ranks; below it a launcher counts ranks from 0."""
    return f"{logs}/node-{node}" if placement.nodes > 1 else logs
