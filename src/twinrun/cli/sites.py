"""Commands about clusters: jobs, the doctor of a site, and the cluster on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from twinrun.cli.console import print_json
from twinrun.execution import site_description
from twinrun.execution.site_checks import check_site
from twinrun.foundation.errors import InputError, TwinrunError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.terminal import say
from twinrun.images import local_cluster
from twinrun.machine.checks import HostCheck
from twinrun.manifests.cluster import FILE, load_site
from twinrun.manifests.vendor import load_gpus


def cluster(root: Path, what: str, *, nodes: int, mounts: Sequence[Path]) -> None:
    """Start, list or remove the cluster on this machine, and print its nodes; raises InputError."""
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
            "unknown command",
            place="invoke cluster",
            found=what,
            allowed=["up", "status", "down", "describe"],
        )
    for node in found:
        say(f"{node.name:12} {node.container:10} {node.slurm}")
    if not found:
        say("no cluster; `invoke cluster up` starts one")


def describe(root: Path, *, site: str | None, partition: str | None) -> None:
    """Write a first cluster.toml from what Slurm says here, or print it where there is one.

    Args:
        site: one whose `client` leads to Slurm, where this machine has none of its commands.
    """
    known = load_site(root, site).site if site else None
    text = site_description.describe(
        client=known.client if known else (),
        partition=partition,
        gpus=load_gpus(root),
        scheduler=known.scheduler if known else "slurm",
    )
    file = root / FILE
    if file.exists() or site:
        say(text, end="")
        return
    write_atomically(file, text)
    say(f"written: {file}; `invoke doctor --cluster` holds it against the site")


def doctor(root: Path, site: str, *, as_json: bool, proof: bool = False) -> int:
    """Print what is well and what is not at a site; 3 when something needed is broken."""
    diagnosis = check_site(root, load_site(root, site))
    if proof:
        diagnosis = diagnosis.model_copy(update={"checks": (*diagnosis.checks, _proved(root, site))})
    if as_json:
        print_json(diagnosis.model_dump(mode="json"))
        return diagnosis.exit_code
    from twinrun.report.terminal import diagnosis_lines, show

    for line in diagnosis_lines(diagnosis, width=None):
        show(line)
    return diagnosis.exit_code


def _proved(root: Path, site: str) -> HostCheck:
    """Run one all-reduce on two nodes of a site and say what carried it how fast."""
    from twinrun.planning.project import Project
    from twinrun.runs.proof import ENOUGH, prove

    needed = f"{ENOUGH:.0%} of what the links can do"
    try:
        found = prove(Project(root), site, say=lambda line: say(line, file=sys.stderr))
    except TwinrunError as error:
        text = " ".join(f"{error.message}: {error.found or ''}".split())
        return HostCheck(name="proof", status="fail", found=text, needed=needed, hint=error.hint)
    text = f"{found.bus_gb_s:.2f} GB/s between {' and '.join(found.nodes)}, {found.transport}"
    if found.share is None:
        hint = "set `network_gbit_s` of the site, and the share is judged"
        return HostCheck(name="proof", status="unknown", found=text, needed=needed, hint=hint)
    slow = found.share < ENOUGH
    return HostCheck(
        name="proof",
        status="fail" if slow else "ok",
        found=f"{text}, {found.share:.0%} of the links",
        needed=needed,
        hint="see the row `network`: another transport carried it" if slow else None,
    )
