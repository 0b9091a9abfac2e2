"""PBS (OpenPBS, PBS Professional): one job a point, whose chunks are its nodes.

Golden files hold the scripts, and answers as its documentation has them play it; no machine of ours ran one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twinrun.execution.batch import ENDLESS, BatchScheduler, JobState, NodeState, gib_of, seconds_of
from twinrun.execution.job_script import LOG, Task

# Letters of states in which a job has ended.
_ENDED = ("F", "X", "C")
_IN_SERVICE = {"free", "job-busy", "job-exclusive", "busy", "resv-exclusive"}


class Pbs(BatchScheduler):
    """The PBS of a site."""

    name, title, prefix, number, remote = "pbs", "PBS", "#PBS", "${PBS_JOBID%%[.[]*}", ("pbs_tmrsh",)
    abilities = ("hosts",)
    # One line for each rank of a node.
    hosts = "awk '!seen[$0]++' \"$PBS_NODEFILE\""

    def options(self, task: Task) -> Iterator[str]:
        """Yield the options of qsub."""
        site = self.site.site
        yield f"-N {task.job_name.replace('=', '-')[:200]}"
        yield "-S /bin/bash"
        chunk = [f"ncpus={task.ranks_per_node * task.cores_per_rank}", f"mpiprocs={task.ranks_per_node}"]
        if site.gres and site.devices_by == "gres":
            chunk.append(f"{site.gres}={task.ranks_per_node}")
        if memory := self.memory_gib(task):
            chunk.append(f"mem={memory}gb")
        if site.constraint:
            chunk.append(f"{site.constraint}=true")
        yield f"-l select={task.nodes}:{':'.join(chunk)}"
        yield f"-l place=scatter{':excl' if site.exclusive else ''}"
        yield f"-l walltime={site.minutes // 60:02}:{site.minutes % 60:02}:00"
        if site.partition:
            yield f"-q {site.partition}"
        if site.account:
            yield f"-A {site.account}"
        yield f"-r {'y' if site.requeue else 'n'}"
        yield from site.options

    def submit_words(self, run: Path, logs: Path) -> tuple[str, ...]:
        """Return the qsub of a script."""
        return ("qsub", "-j", "oe", "-o", str(logs / LOG))

    def all_jobs(self) -> list[JobState]:
        """Return the jobs that wait or run."""
        return [_job(number, one) for number, one in self._told("Jobs", "qstat", "-f", "-F", "json").items()]

    def all_nodes(self) -> list[NodeState]:
        """Return the nodes with what their chunks may have."""
        return [_node(name, one) for name, one in self._told("nodes", "pbsnodes", "-a", "-F", "json").items()]

    def version(self) -> str:
        """Return what the server says of itself."""
        (name, one), *_ = self._told("Server", "qstat", "-B", "-f", "-F", "json").items()
        return f"PBS {one.get('pbs_version', '')}; {name} is {one.get('server_state', 'silent')}"

    def longest(self, partition: str | None) -> tuple[str, float]:
        """Return the queue and the longest time of its jobs."""
        words = [partition] if partition else []
        found = self._told("Queue", "qstat", "-Q", "-f", "-F", "json", *words)
        name = partition or next(iter(found), "")
        longest = found.get(name, {}).get("resources_max", {}).get("walltime", "")
        return name, seconds_of(longest) if longest else ENDLESS

    def _told(self, what: str, *command: str) -> dict[str, dict[str, Any]]:
        return dict(self.told(lambda text: json.loads(text).get(what, {}), *command))


def _job(number: str, one: dict[str, Any]) -> JobState:
    hosts = dict.fromkeys(part.partition("/")[0] for part in one.get("exec_host", "").split("+"))
    run = seconds_of(one.get("resources_used", {}).get("walltime", ""))
    keys = {"name": "Job_Name", "state": "job_state", "reason": "comment", "status": "Exit_status"}
    told = {"id": number, **{key: one[name] for key, name in keys.items() if name in one}}
    told |= {"user": one.get("Job_Owner", "").partition("@")[0], "nodes": ",".join(filter(None, hosts))}
    told |= {"ended": told["state"] in _ENDED}
    told |= {"limit_seconds": seconds_of(one.get("Resource_List", {}).get("walltime", ""))}
    return JobState.model_validate(told | {"run_seconds": run if run < ENDLESS else 0.0})


def _node(name: str, one: dict[str, Any]) -> NodeState:
    there = one.get("resources_available", {})
    counted = {key: int(value) for key, value in there.items() if str(value).isdecimal() and key != "ncpus"}
    queues = tuple(filter(None, str(one.get("queue") or there.get("Qlist") or "").split(",")))
    up = set(str(one.get("state", "")).split(",")) <= _IN_SERVICE
    cores, memory = int(there.get("ncpus", 0)), gib_of(str(there.get("mem", "0")))
    return NodeState(name=name, up=up, cores=cores, memory_gib=memory, devices=counted, partitions=queues)
