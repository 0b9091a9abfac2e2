"""Slurm: one batch job a point."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from twinrun.execution.batch import LOST, STOPPED, BatchScheduler, JobState, NodeState, seconds_of
from twinrun.execution.job_script import LOG, Task
from twinrun.foundation.errors import MachineError

_TEXTS = {"name": "JobName", "reason": "Reason", "nodes": "NodeList"}
_TIMES = {"run_seconds": "RunTime", "limit_seconds": "TimeLimit"}
_FIELD = re.compile(r"(\w+)=(\S*)")
_OUT_OF_SERVICE = re.compile("DOWN|DRAIN|FAIL|FUTURE")
# Where a job is in no state that it leaves by itself.
_ENDED = {*STOPPED, *LOST, "COMPLETED", "FAILED", "OUT_OF_MEMORY", "SPECIAL_EXIT"}


class Slurm(BatchScheduler):
    """The Slurm of a site."""

    name, title, prefix, number, node = "slurm", "Slurm", "#SBATCH", "SLURM_JOB_ID", "$SLURM_NODEID"
    abilities = ("steps", "hosts")
    hosts = 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
    # Slurm itself requeues what it preempts; asked as well, it would start the job once more than needed.
    again = (
        '[[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) != RUNNING ]]'
        ' || scontrol requeue "$SLURM_JOB_ID"'
    )
    cancel_words = ("scancel", "--quiet")

    def options(self, task: Task) -> Iterator[str]:
        """Yield the options of sbatch."""
        site, memory = self.site.site, self.memory_gib(task)
        yield f"--job-name={task.job_name}"
        yield f"--nodes={task.nodes}"
        yield f"--ntasks-per-node={task.ranks_per_node}"
        yield f"--cpus-per-task={task.cores_per_rank}"
        if memory is not None:
            yield f"--mem={memory}{'G' if memory else ''}"
        yield f"--time={site.minutes}"
        for name in ("partition", "account", "qos", "constraint"):
            if value := getattr(site, name):
                yield f"--{name}={value}"
        if site.devices_by == "gpus-per-node":
            yield f"--gpus-per-node={task.ranks_per_node}"
        elif site.gres and site.devices_by == "gres":
            yield f"--gres={site.gres}:{task.ranks_per_node}"
        if site.exclusive:
            yield "--exclusive"
        if site.exclude:
            yield f"--exclude={','.join(site.exclude)}"
        if site.signal_seconds:
            yield f"--signal=TERM@{site.signal_seconds}"
        yield "--requeue" if site.requeue else "--no-requeue"
        yield from site.options

    def each_node(self, task: Task, logs: str) -> tuple[str, ...]:
        """Return the srun that starts one task on every node."""
        cores = task.ranks_per_node * task.cores_per_rank
        return (
            *("srun", f"--nodes={task.nodes}", f"--ntasks={task.nodes}", "--ntasks-per-node=1"),
            # Since Slurm 22.05 srun does not take it from sbatch.
            *(f"--cpus-per-task={cores}", "--cpu-bind=none", "--kill-on-bad-exit=1", "--input=none"),
            f"--output={_pattern(logs)}/launcher-%n.log",
        )

    def submit_words(self, run: Path, logs: Path) -> tuple[str, ...]:
        """Return the sbatch of a script."""
        return ("sbatch", "--parsable", f"--output={_pattern(str(logs))}/{LOG}", f"--chdir={run}")

    def state(self, number: str) -> JobState | None:
        """Return what the controller says of a job, None of one that it has forgotten."""
        try:
            found: JobState = self.told(_job, "scontrol", "show", "job", number, "--oneliner")
        except MachineError as error:
            if "Invalid job id" in str(error.found):
                return None
            raise
        return found

    def all_jobs(self) -> list[JobState]:
        """Return the jobs of all users."""
        lines = self.ask("scontrol", "show", "job", "--oneliner").splitlines()
        return [_job(line) for line in lines if line.startswith("JobId=")]

    def host_names(self, nodes: str) -> tuple[str, ...]:
        """Return host names written out; empty for none."""
        return tuple(self.ask("scontrol", "show", "hostnames", nodes).split()) if nodes else ()

    def all_nodes(self) -> list[NodeState]:
        """Return the nodes with what jobs may use: without cores and memory that are kept from them."""
        lines = self.ask("scontrol", "show", "node", "--oneliner").splitlines()
        return [_node(_fields(line)) for line in lines if line.startswith("NodeName=")]

    def version(self) -> str:
        """Return version and controller."""
        ping = self.ask("scontrol", "ping").strip().splitlines()[0]
        if "is UP" not in ping:
            raise MachineError("Slurm refuses", place="scontrol", found=ping)
        return f"{self.ask('scontrol', '--version').strip()}; {ping}"

    def longest(self, partition: str | None) -> tuple[str, float]:
        """Return the partition and the limit of its jobs."""
        words = [partition] if partition else []
        lines = self.ask("scontrol", "show", "partition", *words, "--oneliner").splitlines()
        found = [_fields(line) for line in lines if line.startswith("PartitionName=")]
        one = next((one for one in found if partition or one.get("Default") == "YES"), (found or [{}])[0])
        return one.get("PartitionName", ""), seconds_of(one.get("MaxTime", ""))

    def accounts(self) -> list[str] | None:
        """Return what accounting says of this user."""
        user = self.ask("id", "-un").strip()
        words = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={user}", "format=Account")
        with contextlib.suppress(MachineError):
            return sorted(set(self.ask(*words).split()))
        return None

    def judged(self) -> str:
        """Let sbatch judge a job of one node."""
        options = list(self.options(self.one_node()))
        self.ask("sbatch", "--test-only", *options, "--wrap=true")
        return " ".join(options)

    def faults(self) -> str:
        """Return the nodes that are down, with the controller's reasons."""
        with contextlib.suppress(MachineError):
            listed = self.ask("sinfo", "--noheader", "--Node", "--states=down", "--format=%N %E")
            return ", ".join(dict.fromkeys(listed.splitlines()))
        return ""


def _job(line: str) -> JobState:
    """Read one line of `scontrol show job --oneliner`; raises LookupError, ValueError."""
    fields = {name: "" if value == "(null)" else value for name, value in _fields(line).items()}
    status, _, signal = fields["ExitCode"].partition(":")
    told: dict[str, object] = {key: fields.get(name, "") for key, name in _TEXTS.items()}
    told |= {key: seconds_of(fields.get(name, "")) for key, name in _TIMES.items()}
    told |= {"id": fields["JobId"], "state": fields["JobState"], "ended": fields["JobState"] in _ENDED}
    told |= {"user": fields.get("UserId", "").partition("(")[0]}
    return JobState.model_validate(told | {"status": -int(signal or 0) or int(status)})


def _node(fields: dict[str, str]) -> NodeState:
    # Without the cores and the memory that Slurm keeps; before 20.11 it tells no number of the former.
    cores = int(fields.get("CPUEfctv") or fields.get("CPUTot", "0"))
    devices = Counter[str]()
    # A type with its count, and the sockets that it is beside.
    for part in re.findall(r"[^,(]+(?:\([^)]*\))?", fields.get("Gres", "").replace("(null)", "")):
        if found := re.match(r"(.+?)(?::(\d+))?(?:\(.*)?$", part):
            devices[found[1]] += int(found[2] or 1)
    return NodeState(
        name=fields["NodeName"],
        up=not _OUT_OF_SERVICE.search(fields.get("State", "")),
        cores=cores,
        memory_gib=(int(fields.get("RealMemory", "0")) - int(fields.get("MemSpecLimit", "0"))) // 1024,
        devices=devices,
        partitions=tuple(fields.get("Partitions", "").split(",")),
    )


def _fields(line: str) -> dict[str, str]:
    """Return the fields of a line of `scontrol show`, the first of each name."""
    return dict(reversed(_FIELD.findall(line)))


def _pattern(path: str) -> str:
    """Return a path in which Slurm replaces nothing."""
    return path.replace("%", "%%")
