"""Grid Engine: one job a point in a parallel environment, whose slots are the ranks of its nodes."""

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
_OWN = ("N", "q", "P", "pe", "o", "e", "j", "S", "wd", "cwd", "notify", "r")


def open_scheduler(*, site: LoadedSite | None) -> GridEngine:
    """Return the Grid Engine of a site; raises InputError without one, or without what its jobs need."""
    if site is None:
        hint = "add --cluster SITE, of cluster.toml"
        raise InputError("a site is needed", place="--scheduler gridengine", found="no --cluster", hint=hint)
    if site.site.parallel_environment is None:
        raise InputError(
            "jobs of several slots need a parallel environment",
            place=f"{site.place}.parallel_environment",
            found="missing",
            hint="`qconf -spl` lists them; one with a fixed allocation_rule gives whole nodes",
        )
    if site.site.gpu and not site.site.gres:
        raise InputError(
            "a job of this site would get no GPU",
            place=f"{site.place}.gres",
            found="missing",
            hint='add the line `gres = "gpu"`, the name of the resource that `qconf -sc` has',
        )
    refuse_own_options(site, _OWN)
    return GridEngine(site)


class GridEngine:
    """The scheduler of one site."""

    name = "gridengine"
    abilities = Abilities()

    def __init__(self, site: LoadedSite) -> None:
        self.site = site

    def size(self) -> int:
        """Return the hosts of the queue that are up; raises MachineError without an answer."""
        try:
            listed = ask(self.site, "qstat", "-f", *_queue(self.site.site)).splitlines()
        except RunError as error:
            found = str(error.found).strip()
            raise MachineError("Grid Engine does not answer", place=self.site.place, found=found) from None
        rows = [line.split() for line in listed if "@" in line]
        # The sixth column, where there is one, has letters for what is wrong; a is a load that passes.
        return len({row[0].partition("@")[2] for row in rows if not set("udEcCsS") & set("".join(row[5:6]))})

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
            prefix="#$",
            options=tuple(_options(task, self.site.site)),
            hosts="awk '{print $1}' \"$PE_HOSTFILE\"",
            node="$node",
            number="JOB_ID",
            remote=("qrsh", "-inherit"),
        )
        return batch_script(task, site=self.site, run=run, logs=logs, dialect=dialect)

    def submit(self, task: Task, *, run: Path, logs: Path, start: Start) -> BatchJob:
        """Write the script of `task` to its logs and hand it to qsub; raises InputError."""
        demand_shared(self.site, run)
        file = logs / SCRIPT
        write_atomically(file, self.script(task, run=str(run), logs=str(logs)))
        words = ("qsub", "-terse", "-wd", str(run), "-j", "y", "-o", str(logs / LOG))
        return self.adopt(submitted(self.site, file, *words).partition(".")[0], point=task.point, logs=logs)

    def adopt(self, handle: str, *, point: str, logs: Path) -> BatchJob:
        """Return the job with the number `handle`."""
        return BatchJob(handle, client=self, logs=logs, point=point)

    def known(self, number: str) -> bool:
        """Say whether a job waits or runs."""
        listed = ask(self.site, "qstat", "-u", "*").splitlines()
        return any(line.split()[:1] == [number] for line in listed)

    def end(self, number: str) -> None:
        """End a job; one that is not there is no error."""
        with contextlib.suppress(RunError):
            ask(self.site, "qdel", number)


def _queue(site: Site) -> tuple[str, ...]:
    return ("-q", site.partition) if site.partition else ()


def _options(task: Task, site: Site) -> Iterator[str]:
    """Yield the options of qsub; cluster.toml holds words alone, so none needs quotes."""
    yield f"-N {job_name(task).replace('=', '-').replace('@', '-')}"
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
