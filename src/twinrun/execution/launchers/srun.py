"""srun: Slurm starts each rank itself."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence

from twinrun.execution.engine import Command, NodeCommand
from twinrun.execution.launchers import Culprit, RankPlacement, Rendezvous, started_by_rank
from twinrun.execution.task import Abilities

IDENTITY = ("SLURM_PROCID", "SLURM_LOCALID")
_LEFT = re.compile(r"^srun: error: .*?: tasks? (\d+)[\d,-]*: Exited with exit code (\d+)", re.MULTILINE)
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
}
_KILLED = re.compile(rf"^srun: error: .*?: tasks? (\d+)[\d,-]*: ({'|'.join(_SIGNALS)})", re.MULTILINE)


def unusable(abilities: Abilities) -> str | None:
    """Return why this launcher cannot start ranks with such abilities of the scheduler, or None."""
    return None if abilities.steps else "srun starts ranks where the scheduler is Slurm"


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
    """Return the command of one rank, which srun starts on every node."""
    return in_stack(started_by_rank(command, placement=placement, rendezvous=rendezvous, cores=cores))


def starter(placement: RankPlacement, *, cores: int) -> tuple[str, ...]:
    """Return the srun that starts one task for each rank."""
    return (
        *("srun", f"--nodes={placement.nodes}", f"--ntasks={placement.world_size}"),
        *(f"--ntasks-per-node={placement.devices_per_node}", "--distribution=block"),
        # Since Slurm 22.05 srun does not take the first from sbatch. Ranks bind themselves, each to the cores
        # beside its device.
        *(f"--cpus-per-task={cores}", "--cpu-bind=none"),
        # Tasks without a peer would wait for it until the time limit.
        *("--kill-on-bad-exit=1", "--input=none"),
    )


def culprit(logs: Sequence[str]) -> Culprit | None:
    """Return the first task that srun names; those that it ends for it are named later."""
    found = []
    for log in logs:
        found += [(one.start(), Culprit(int(one[1]), int(one[2]))) for one in _LEFT.finditer(log)]
        found += [(one.start(), Culprit(int(one[1]), -_SIGNALS[one[2]])) for one in _KILLED.finditer(log)]
    return min(found)[1] if found else None
