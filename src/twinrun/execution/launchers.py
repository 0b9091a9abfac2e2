"""Launchers, a class each: what starts a command once per rank or per node of a placement."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from twinrun.execution import shell
from twinrun.execution.engine import PYTHON, Command
from twinrun.execution.task import Abilities
from twinrun.foundation.errors import require_known
from twinrun.protocol.allocation import Placement
from twinrun.protocol.job import OUT_OF_MEMORY


class Rendezvous(NamedTuple):
    """Where and under which name the nodes of one start meet."""

    first_node: str
    """Name of the node with the first rank, as the others resolve it."""
    port: str
    """A number, or the variable of a script that has it."""
    id: str
    """Unlike that of every other start."""


class Culprit(NamedTuple):
    """The rank that failed first."""

    rank: int
    status: int
    """Exit status; a negative one is a signal."""


class Launcher:
    """One that starts every rank itself, from the first node."""

    IDENTITY: tuple[str, str] | None = None
    """Variables with the rank of a process and its rank on its node, where `starter` starts the ranks."""

    def unusable(self, abilities: Abilities) -> str | None:
        """Return why ranks cannot be started on what a scheduler with these abilities gives, or None."""
        return None

    def starter(self, placement: Placement, *, cores: int) -> tuple[str, ...]:
        """Return the words that start a command for every rank from the first node; empty for one a node.

        Args:
            cores: CPU cores of each rank.
        """
        return ()

    def render(
        self,
        command: Command,
        *,
        placement: Placement,
        node: str,
        rendezvous: Rendezvous,
        logs: str,
        cores: int,
    ) -> Command:
        """Return what the stack runs on one node so that every rank of it runs `command`; pure.

        Args:
            node: place of the node among those of the allocation, or what stands for it.
            logs: folder for a log of each rank, as the ranks see it.
            cores: CPU cores of each rank.
        """
        assert command.arguments[0] == PYTHON
        words, own = self.inside(placement, node, rendezvous, logs)
        # Threads that spin while they wait take the cores from whatever else runs here: with two busy
        # processes beside it, one CPU rank took 2.2 s a step instead of 0.37.
        threads = {"OMP_NUM_THREADS": str(cores), "OMP_WAIT_POLICY": "PASSIVE"}
        return Command(
            arguments=(PYTHON, *words, *command.arguments[1:]),
            variables={**threads, **own, **command.variables},
            reaches_nodes=placement.nodes > 1,
        )

    def inside(
        self, placement: Placement, node: str, rendezvous: Rendezvous, logs: str
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the words of the stack's Python before the command, and the variables of every rank."""
        return (), {
            "RANK": f"${shell.RANK}",
            "LOCAL_RANK": f"${shell.LOCAL_RANK}",
            "GROUP_RANK": f"${shell.NODE}",
            "WORLD_SIZE": str(placement.world_size),
            "LOCAL_WORLD_SIZE": str(placement.devices_per_node),
            "MASTER_ADDR": rendezvous.first_node,
            "MASTER_PORT": rendezvous.port,
        }

    def culprit(self, logs: Sequence[str]) -> Culprit | None:
        """Return the rank that failed first, as the outputs of the nodes' commands name it."""
        raise NotImplementedError


class Torchrun(Launcher):
    """One agent a node, which starts the node's ranks; it is a program of the stack."""

    _FAILURE = re.compile(r"^\s*rank\s*: (\d+).*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)

    def inside(
        self, placement: Placement, node: str, rendezvous: Rendezvous, logs: str
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the agent of one node."""
        alone = placement.nodes == 1
        # `static` keeps ranks in the order of the nodes, `c10d` does not.
        meeting = (
            *("--nnodes", str(placement.nodes), "--node-rank", node),
            *("--rdzv-backend", "static", "--rdzv-id", rendezvous.id),
            *("--rdzv-endpoint", f"{rendezvous.first_node}:{rendezvous.port}"),
        )
        words = (
            *("-m", "torch.distributed.run", *(("--standalone",) if alone else meeting)),
            *("--nproc-per-node", str(placement.devices_per_node)),
            *("--log-dir", node_logs(logs, placement=placement, node=node), "--redirects", "3"),
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
            if told and (causes := self._FAILURE.findall(first)):
                named = (*causes, *self._FAILURE.findall(others))
                found += [Culprit(int(rank), int(status)) for rank, status in named]
        own = (one for one in found if one.status == OUT_OF_MEMORY or -signal.SIGTERM != one.status < 0)
        return next(own, next(iter(found), None))


class Srun(Launcher):
    """Slurm starts each rank itself."""

    IDENTITY = ("SLURM_PROCID", "SLURM_LOCALID")
    _SIGNALS = {  # noqa: RUF012
        "Killed": signal.SIGKILL,
        "Terminated": signal.SIGTERM,
        "Segmentation fault": signal.SIGSEGV,
        "Aborted": signal.SIGABRT,
    }
    _ENDED = re.compile(
        r"^srun: error: .*?: tasks? (\d+)[\d,-]*: "
        rf"(?:Exited with exit code (\d+)|({'|'.join(_SIGNALS)}))",
        re.MULTILINE,
    )

    def unusable(self, abilities: Abilities) -> str | None:
        """Return that the scheduler must be Slurm, where it is another."""
        return None if abilities.steps else "srun starts ranks where the scheduler is Slurm"

    def starter(self, placement: Placement, *, cores: int) -> tuple[str, ...]:
        """Return the srun that starts one task for each rank."""
        return (
            *("srun", f"--nodes={placement.nodes}", f"--ntasks={placement.world_size}"),
            *(f"--ntasks-per-node={placement.devices_per_node}", "--distribution=block"),
            # Since Slurm 22.05 srun does not take the first from sbatch. Ranks bind themselves, each to the
            # cores beside its device.
            *(f"--cpus-per-task={cores}", "--cpu-bind=none"),
            # Tasks without a peer would wait for it until the time limit.
            *("--kill-on-bad-exit=1", "--input=none"),
        )

    def culprit(self, logs: Sequence[str]) -> Culprit | None:
        """Return the first task that srun names; those that it ends for it are named later."""
        found = next((one for log in logs if (one := self._ENDED.search(log))), None)
        return found and Culprit(int(found[1]), int(found[2]) if found[2] else -self._SIGNALS[found[3]])


class Mpirun(Launcher):
    """mpirun of OpenMPI: its ranks meet as those of torchrun do."""

    IDENTITY = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    _LEFT = re.compile(r"^\s*Process name: \[.*?,(\d+)\]\s*\n\s*Exit code:\s+(\d+)", re.MULTILINE)
    _SIGNALLED = re.compile(r"process rank (\d+) with PID \d+ .*?\s+exited on\s+signal (\d+)", re.DOTALL)

    def unusable(self, abilities: Abilities) -> str | None:
        """Return that the scheduler must name hosts, where it does not."""
        return None if abilities.hosts else "mpirun starts ranks where a scheduler names the hosts of its job"

    def starter(self, placement: Placement, *, cores: int) -> tuple[str, ...]:
        """Return the mpirun that starts one process for each rank, those of a node side by side."""
        return (
            *("mpirun", "--hostfile", "$TWINRUN_HOSTS", "-n", str(placement.world_size)),
            *("--map-by", f"ppr:{placement.devices_per_node}:node", "--bind-to", "none"),
            # Slurm starts its daemons. As root, which a user of containers may be, it wants to be told.
            *("--allow-run-as-root", "-x", "RUN", "-x", shell.FIRST_NODE),
        )

    def culprit(self, logs: Sequence[str]) -> Culprit | None:
        """Return the process that mpirun names as the one that ended it."""
        for log in logs:
            for pattern, sign in ((self._SIGNALLED, -1), (self._LEFT, 1)):
                if found := pattern.search(log):
                    return Culprit(int(found[1]), sign * int(found[2]))
        return None


LAUNCHERS: dict[str, Launcher] = {"mpirun": Mpirun(), "srun": Srun(), "torchrun": Torchrun()}


def load_launcher(name: str) -> Launcher:
    """Return the launcher called `name`; raises InputError when there is none."""
    require_known(name, list(LAUNCHERS), "unknown launcher", place="--launcher")
    return LAUNCHERS[name]


def node_logs(logs: str, *, placement: Placement, node: str) -> str:
    """Return the folder for the logs of a node's ranks; below it a launcher counts ranks from 0."""
    return f"{logs}/node-{node}" if placement.nodes > 1 else logs
