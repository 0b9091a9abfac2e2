"""Kubernetes: each point as a JobSet that `--dry` prints and kubectl takes; nothing is submitted."""

from __future__ import annotations

import json
from pathlib import Path

from twinrun.execution import shell
from twinrun.execution.job_set import job_set
from twinrun.execution.schedulers import Start, Submission, Task
from twinrun.foundation.errors import InputError, MachineError
from twinrun.manifests.cluster import LoadedSite

_ONLY = "a JobSet is printed, not submitted"
_HINT = "`--dry --json` prints it; with RUN replaced, `kubectl apply` takes it"


def open_scheduler(*, site: LoadedSite | None) -> Kubernetes:
    """Return the Kubernetes of a site; raises InputError without one."""
    if site is None:
        hint = "add --cluster SITE, of cluster.toml"
        raise InputError("a site is needed", place="--scheduler kubernetes", found="no --cluster", hint=hint)
    return Kubernetes(site)


class Kubernetes:
    """The scheduler of one site."""

    name = "kubernetes"

    def __init__(self, site: LoadedSite) -> None:
        self.site = site

    def unusable(self, *, nodes: int) -> str | None:
        """Return why no nodes can be had from here."""
        return _ONLY

    def first_node(self) -> str:
        """Return the variable of the pods that has the first one."""
        return f"${shell.FIRST_NODE}"

    def node_names(self, nodes: int) -> tuple[str, ...]:
        """Return one variable: all pods start the same command."""
        return (f"${shell.NODE}",)

    def script(self, task: Task, *, run: str, logs: str) -> str:
        """Return the JobSet of `task`, as JSON, which is YAML as well; pure."""
        return json.dumps(job_set(task, site=self.site), indent=1) + "\n"

    def submit(self, task: Task, *, run: Path, logs: Path, start: Start) -> Submission:
        """Raise MachineError: nothing is submitted from here."""
        raise MachineError(_ONLY, place="--scheduler kubernetes", found=task.point, hint=_HINT)
