"""PBS (OpenPBS, PBS Professional): one job a point, whose chunks are its nodes.

Rendered: golden files hold the scripts, and no machine of ours has run one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from twinrun.execution import shell
from twinrun.execution.abilities import Abilities
from twinrun.execution.batch import (
    LOG,
    SCRIPT,
    Dialect,
    batch_script,
    demand_shared,
    job_name,
    refuse_own_options,
)
from twinrun.execution.batch_job import BatchJob, ask, submitted
from twinrun.execution.schedulers import Start
from twinrun.execution.task import Task
from twinrun.foundation.errors import InputError, MachineError, RunError
from twinrun.foundation.files import write_atomically
from twinrun.manifests.cluster import LoadedSite, Site

# Options of qsub that other keys of a site stand for.
_OWN = ("N", "q", "A", "o", "e", "j", "S", "r")


def open_scheduler(*, site: LoadedSite | None) -> Pbs:
    """Return the PBS of a site; raises InputError without one, or where its jobs would get no GPU."""
    if site is None:
        hint = "add --cluster SITE, of cluster.toml"
        raise InputError("a site is needed", place="--scheduler pbs", found="no --cluster", hint=hint)
    if site.site.gpu and site.site.devices_by == "gres" and not site.site.gres:
        raise InputError(
            "a job of this site would get no GPU",
            place=f"{site.place}.gres",
            found="missing",
            hint='add the line `gres = "ngpus"`, the resource of a chunk, or `devices_by = "whole-node"`',
        )
    refuse_own_options(site, _OWN)
    return Pbs(site)


class Pbs:
    """The scheduler of one site."""

    name = "pbs"
    abilities = Abilities(hosts=True)

    def __init__(self, site: LoadedSite) -> None:
        self.site = site

    def size(self) -> int:
        """Return the nodes that PBS calls free or busy; raises MachineError where it does not answer."""
        try:
            listed = ask(self.site, "pbsnodes", "-a")
        except RunError as error:
            found = str(error.found).strip()
            raise MachineError("PBS does not answer", place=self.site.place, found=found) from None
        states = [line.partition("=")[2].strip() for line in listed.splitlines() if "state =" in line]
        return sum(state in ("free", "job-busy", "job-exclusive", "busy") for state in states)

    def unusable(self, *, nodes: int) -> str | None:
        """Return why so many nodes cannot be had, or None."""
        found = self.size()
        many = f"the plan has points of up to {nodes} nodes, and {found} of the site are up"
        return many if nodes > found else None

    def first_node(self) -> str:
        """Return the variable of the script that has the first node."""
        return f"${shell.FIRST_NODE}"

    def port(self) -> str:
        """Return the variable of the script that has a port of the job's own."""
        return f"${shell.PORT}"

    def node_names(self, nodes: int) -> tuple[str, ...]:
        """Return one variable: all nodes start the same command."""
        return (f"${shell.NODE}",)

    def script(self, task: Task, *, run: str, logs: str) -> str:
        """Return the script for qsub; pure."""
        dialect = Dialect(
            prefix="#PBS",
            options=tuple(_options(task, self.site.site)),
            # One line for each rank of a node.
            hosts="awk '!seen[$0]++' \"$PBS_NODEFILE\"",
            node="$node",
            number="${PBS_JOBID%%[.[]*}",
            remote=("pbs_tmrsh",),
        )
        return batch_script(task, site=self.site, run=run, logs=logs, dialect=dialect)

    def submit(self, task: Task, *, run: Path, logs: Path, start: Start) -> BatchJob:
        """Write the script of `task` to its logs and hand it to qsub; raises InputError."""
        demand_shared(self.site, run)
        file = logs / SCRIPT
        write_atomically(file, self.script(task, run=str(run), logs=str(logs)))
        words = ("qsub", "-j", "oe", "-o", str(logs / LOG))
        return self.adopt(submitted(self.site, file, *words), point=task.point, logs=logs)

    def adopt(self, handle: str, *, point: str, logs: Path) -> BatchJob:
        """Return the job called `handle`."""
        return BatchJob(handle, client=self, logs=logs, point=point)

    def known(self, number: str) -> bool:
        """Say whether a job waits or runs: qstat lists no other."""
        listed = ask(self.site, "qstat").splitlines()
        return any(line.split()[:1] == [number] for line in listed)

    def end(self, number: str) -> None:
        """End a job; one that is not there is no error."""
        with contextlib.suppress(RunError):
            ask(self.site, "qdel", number)


def _options(task: Task, site: Site) -> Iterator[str]:
    """Yield the options of qsub; cluster.toml holds words alone, so none needs quotes."""
    yield f"-N {job_name(task).replace('=', '-')[:200]}"
    yield "-S /bin/bash"
    chunk = [f"ncpus={task.ranks_per_node * task.cores_per_rank}", f"mpiprocs={task.ranks_per_node}"]
    if site.gres and site.devices_by == "gres":
        chunk.append(f"{site.gres}={task.ranks_per_node}")
    if site.memory_gib:
        chunk.append(f"mem={site.memory_gib}gb")
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
