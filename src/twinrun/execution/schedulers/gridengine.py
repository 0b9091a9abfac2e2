"""Grid Engine: one job a point in a parallel environment, whose slots are the ranks of its nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from twinrun.execution.batch import BatchScheduler, JobState, NodeState, gib_of, seconds_of
from twinrun.execution.job_script import LOG, Task
from twinrun.foundation.errors import InputError

_STATE = "queuevalue[@name='state_string']"


class GridEngine(BatchScheduler):
    """The Grid Engine of a site."""

    name, title, prefix, number, remote = "gridengine", "Grid Engine", "#$", "JOB_ID", ("qrsh", "-inherit")
    hosts = "awk '{print $1}' \"$PE_HOSTFILE\""

    def demand(self) -> None:
        """Raise InputError where jobs would get no device or no parallel environment."""
        if self.site.site.parallel_environment is None:
            message, place = "jobs of several slots need a parallel environment", self.site.place
            hint = "`qconf -spl` lists them; one with a fixed allocation_rule gives whole nodes"
            raise InputError(message, place=f"{place}.parallel_environment", found="missing", hint=hint)
        super().demand()

    def options(self, task: Task) -> Iterator[str]:
        """Yield the options of qsub."""
        site = self.site.site
        yield f"-N {task.job_name.replace('=', '-').replace('@', '-')}"
        yield "-S /bin/bash"
        yield f"-pe {site.parallel_environment} {task.nodes * task.ranks_per_node}"
        yield f"-l h_rt={site.minutes * 60}"
        if site.partition:
            yield f"-q {site.partition}"
        if site.account:
            yield f"-P {site.account}"
        if site.gres:
            # Counted for each slot, which is a rank.
            yield f"-l {site.gres}=1"
        if site.exclusive:
            yield "-l exclusive=true"
        yield f"-r {'y' if site.requeue else 'n'}"
        yield from site.options

    def submit_words(self, run: Path, logs: Path) -> tuple[str, ...]:
        """Return the qsub of a script."""
        return ("qsub", "-terse", "-wd", str(run), "-j", "y", "-o", str(logs / LOG))

    def all_jobs(self) -> list[JobState]:
        """Return the jobs that wait or run."""
        told = self.told(ElementTree.fromstring, "qstat", "-xml", "-u", "*")
        return [_job(one) for one in told.iter("job_list")]

    def all_nodes(self) -> list[NodeState]:
        """Return the hosts with their slots' queues."""
        hosts = self.told(ElementTree.fromstring, "qhost", "-q", "-F", "-xml").iter("host")
        return [_node(one) for one in hosts if one.get("name") != "global"]

    def version(self) -> str:
        """Return what qstat says of itself."""
        return self.ask("qstat", "-help").splitlines()[0].strip()

    def longest(self, partition: str | None) -> tuple[str, float]:
        """Return the queue and the longest time of its jobs."""
        name = partition or self.ask("qconf", "-sql").split()[0]
        shown = re.search(r"^h_rt\s+(\S+)", self.ask("qconf", "-sq", name), re.MULTILINE)
        return name, seconds_of(shown[1] if shown else "")

    def judged(self) -> str:
        """Let qsub say whether any host could take a job of one node."""
        options = " ".join(self.options(self.one_node())).split()
        self.ask("qsub", "-w", "v", *options, "-b", "y", "true")
        return " ".join(options)


def _job(one: ElementTree.Element) -> JobState:
    keys = {"id": "JB_job_number", "name": "JB_name", "state": "state", "user": "JB_owner"}
    told = {key: one.findtext(name, "") for key, name in keys.items()}
    return JobState.model_validate({**told, "nodes": one.findtext("queue_name", "").partition("@")[2]})


def _node(host: ElementTree.Element) -> NodeState:
    values = {str(one.get("name")): one.text or "" for one in host.iter("hostvalue")}
    queues = {str(one.get("name")): one.findtext(_STATE, "") for one in host.iter("queue")}
    # Letters for what is wrong with a queue; a is a load that passes.
    up = any(not set("udEcCsS") & set(state) for state in queues.values())
    # The last letter of its dominance tells a consumable from a load.
    named = [one for one in host.iter("resourcevalue") if str(one.get("dominance")).endswith("c")]
    counted = {str(one.get("name")): int(float(one.text or "0")) for one in named}
    own = {"name": str(host.get("name")), "up": up, "partitions": tuple(queues), "devices": counted}
    own |= {"cores": int(float(values.get("num_proc", "-").replace("-", "0")))}
    return NodeState.model_validate({**own, "memory_gib": gib_of(values.get("mem_total", ""))})
