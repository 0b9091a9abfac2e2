"""The commands about clusters, as tasks.py takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from invoke.context import Context
from invoke.tasks import task

from twinrun.cli.exit_codes import exit_on_error
from twinrun.cli.options import count


def site_tasks(root: Path) -> tuple[Any, Any]:
    """Return the tasks `cluster` and `jobs` of the checkout at `root`."""

    @task(
        iterable=["mount"],
        help={
            "what": "up, status or down",
            "nodes": "workers",
            "mount": "folder that nodes see beside checkout, interpreter and cache; may be given many times",
        },
    )
    def cluster(context: Context, what: str, nodes: str = "3", mount: list[str] | None = None) -> None:
        """Start, list or remove a Slurm cluster of containers on this machine: the site `local`."""
        with exit_on_error():
            from twinrun.cli import sites

            sites.cluster(
                root,
                what,
                nodes=count(nodes, "--nodes") or 0,
                mounts=tuple(Path(one).resolve() for one in mount or ()),
            )

    @task(
        help={
            "cluster": "site of cluster.toml",
            "follow": "number of a job whose output is shown until it ends",
            "cancel": "number of a job to end",
        }
    )
    def jobs(context: Context, cluster: str = "local", follow: str = "", cancel: str = "") -> None:
        """List the jobs of twinrun at a site, follow one or end one."""
        with exit_on_error():
            from twinrun.cli import sites

            sites.jobs(root, cluster, follow=follow or None, cancel=cancel or None)

    return cluster, jobs
