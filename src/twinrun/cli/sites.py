"""Commands about clusters: jobs, the doctor of a site, and the cluster on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from twinrun.cli.console import print_json
from twinrun.execution.slurm_client import check_site
from twinrun.foundation.errors import InputError
from twinrun.foundation.terminal import say
from twinrun.images import local_cluster
from twinrun.manifests.cluster import load_site


def cluster(root: Path, what: str, *, nodes: int, mounts: Sequence[Path]) -> None:
    """Start, list or remove the cluster on this machine, and print its nodes."""
    if what == "up":
        found = local_cluster.up(
            root, nodes=nodes, mounts=tuple(mounts), say=lambda line: say(line, file=sys.stderr)
        )
    elif what == "status":
        found = local_cluster.status()
    elif what == "down":
        say(f"{local_cluster.down()} containers removed")
        return
    else:
        raise InputError(
            "unknown command", place="invoke cluster", found=what, allowed=["up", "status", "down"]
        )
    for node in found:
        say(f"{node.name:12} {node.container:10} {node.slurm}")
    if not found:
        say("no cluster; `invoke cluster up` starts one")


def doctor(root: Path, site: str, *, as_json: bool) -> int:
    """Print what is well and what is not at a site; 3 when something needed is broken."""
    diagnosis = check_site(root, load_site(root, site))
    if as_json:
        print_json(diagnosis.model_dump(mode="json"))
        return diagnosis.exit_code
    from twinrun.report.terminal import diagnosis_lines, show

    for line in diagnosis_lines(diagnosis, width=None):
        show(line)
    return diagnosis.exit_code
