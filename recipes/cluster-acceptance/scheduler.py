"""What Slurm and MPI say of a node; without their programs nothing is known."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from peers import host

from twinrun.protocol.checks import ChecksJob
from twinrun.train.checks import CheckError, UndecidedError

# A controller, or mpirun on a node whose processors are busy, may take its time.
SECONDS = 25
SLURM = "install Slurm's client programs on the node, and run this inside an allocation"
# `gpu:8` and `gpu:h200:8`, with or without `(S:0-1)`.
GRES = re.compile(r"\bgpu:(?:[\w.-]+:)?(\d+)")
# Variables in which Slurm, and an MPI that has started the ranks, describe their allocation.
ALLOCATED = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "PRTE_")
ENFORCED = {"limits", "qos", "safe"}


def slurm_gres(_: ChecksJob) -> None:
    """Hold the GRES of this node against its GPUs."""
    shown = answer(["scontrol", "show", "node", host()], remedy=SLURM)
    match = re.search(r"\bGres=(\S+)", shown)
    promised = sum(map(int, GRES.findall(match[1]))) if match else 0
    import torch  # noqa: PLC0415 - only where there is something to compare

    found = torch.cuda.device_count()
    if promised != found:
        raise CheckError(
            f"GRES says {promised} GPUs, {found} are seen", remedy="correct gres.conf, or mend the node"
        )


def mpi_launch(_: ChecksJob) -> None:
    """Start two processes that print a word each."""
    remedy = "install OpenMPI (package openmpi-bin)"
    # In an allocation it would ask Slurm for other nodes, whose processors the ranks have, and wait for ever.
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ALLOCATED)}
    # Root and fewer cores than processes are usual in a container, and refused by default.
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
        variables |= {name: "1", f"{name}_CONFIRM": "1"}
    command = ["mpirun", "-np", "2", "--oversubscribe", "echo", "here"]
    if shutil.which("mpirun") is None and "SLURM_JOB_ID" in os.environ:
        # Sites without mpirun start MPI by srun.
        command = ["srun", "--overlap", "--nodes=1", "--ntasks=2", "--cpus-per-task=1", "--mem=0"]
        command += [f"--nodelist={host()}", "echo", "here"]
        variables = {name: os.environ[name] for name in ("PATH", "SLURM_JOB_ID")}
    said = answer(command, remedy=remedy, variables=variables)
    if said.split().count("here") != 2:
        raise CheckError(
            f"two processes were asked for, the answer is: {said[:200]}", remedy=f"see {command[0]} --version"
        )


def scheduling_priority(_: ChecksJob) -> None:
    """Ask which priority and which preemption the scheduler is set to."""
    shown = answer(["scontrol", "show", "config"], remedy=SLURM)
    wanted = {"PriorityType": "priority/multifactor", "PreemptType": "preempt/"}
    for key, value in wanted.items():
        found = setting(shown, key)
        if not found.startswith(value) or found == "preempt/none":
            raise CheckError(f"{key} is {found or 'not set'}", remedy=f"set {key}={value}... in slurm.conf")


def qos_enforcement(_: ChecksJob) -> None:
    """Ask whether limits are enforced, and whether a QoS has any."""
    enforced = setting(answer(["scontrol", "show", "config"], remedy=SLURM), "AccountingStorageEnforce")
    if not ENFORCED & set(enforced.lower().split(",")):
        raise CheckError(
            f"limits are not enforced: AccountingStorageEnforce is {enforced or 'not set'}",
            remedy="set AccountingStorageEnforce=limits,qos in slurm.conf",
        )
    command = ["sacctmgr", "--noheader", "--parsable2", "show", "qos"]
    command += ["format=GrpTRES,MaxTRESPU,MaxWall,MaxJobsPU"]
    if not any(line.strip("|") for line in answer(command, remedy=SLURM).splitlines()):
        raise CheckError("no QoS has a limit", remedy="give one with sacctmgr modify qos")


def setting(shown: str, key: str) -> str:
    """Return a value of `scontrol show config`, empty where it has none."""
    found = re.search(rf"^{key}\s*=\s*(\S+)", shown, re.MULTILINE)
    return found[1] if found else ""


def answer(command: list[str], *, remedy: str, variables: dict[str, str] | None = None) -> str:
    """Return what a program prints.

    Args:
        variables: its whole environment; that of this process if left out.

    Raises:
        UndecidedError: it is not installed.
        CheckError: it hangs or ends with an error.
    """
    program = shutil.which(command[0])
    if program is None:
        raise UndecidedError(f"{command[0]} is not installed", remedy=remedy)
    try:
        done = subprocess.run(
            [program, *command[1:]],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckError(
            f"{command[0]} gave no answer in {SECONDS} s", remedy="see the log of its daemon"
        ) from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["nothing"]
        raise CheckError(
            f"{command[0]} ended with {done.returncode}: {last[0][:200]}", remedy="see the log of its daemon"
        )
    return done.stdout
