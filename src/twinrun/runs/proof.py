"""A proof that two nodes of a site reach each other as their links can: one all-reduce."""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from twinrun.execution.engine import log_folder, point_folder
from twinrun.execution.ranks import METRICS, Launch, Ranks
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import load_json
from twinrun.manifests.cluster import load_site
from twinrun.planning.project import Project
from twinrun.protocol.allocation import NodeReport
from twinrun.protocol.job import Job
from twinrun.protocol.proof import ProofResult
from twinrun.runs.launches import rank_commands, workspace_of
from twinrun.runs.selection import Request, Selection, select

NODES = 2
_SCRIPT = "twinrun.train.proof"
# How NCCL, and RCCL after it, name what carries messages between nodes.
_NETWORK = re.compile(r"Using network (\S[^\n]*)")
# Below this share of what the links can do something is wrong.
ENOUGH = 0.5


class Proof(NamedTuple):
    """What was found."""

    bus_gb_s: float
    transport: str
    nodes: tuple[str, ...]
    share: float | None
    """Part of the site's `network_gbit_s` that was reached; None where the site does not say it."""


def prove(project: Project, site: str, *, say: Callable[[str], None], engine: str | None = None) -> Proof:
    """Run one all-reduce on two nodes of a site, in its engine or another one.

    Raises:
        MachineError: two nodes cannot be had.
        RunError: a rank failed, or a node died; names it.
    """
    selection = _selection(project, site, engine)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    run = project.root / "runs" / "proof" / f"{stamp}-{uuid.uuid4().hex[:4]}"
    run.mkdir(parents=True)
    workspace = workspace_of(project, selection, run)
    workspace.data.mkdir(parents=True, exist_ok=True)
    opened = selection.engine.open_engine(
        stack=selection.stack, vendor=selection.vendor, workspace=workspace, say=say
    )
    told = {"NCCL_DEBUG": "INFO"}
    commands = rank_commands(selection, renderer=opened, workspace=workspace, variables=told)
    point = selection.plan.points[0]
    job = Job(
        recipe="proof",
        point=point.id,
        world_size=point.world_size,
        accelerator=selection.accelerator,
        out=opened.inside(point_folder(run, point.id)),
        metrics=opened.inside(run / METRICS),
        attempt="",
    )
    ranks = Ranks(engine=opened, commands=commands)
    done = ranks.run(Launch(placement=point, script=_SCRIPT, job=job), show=lambda _line: None)
    assert done is not None, "the message fits into the memory of every device"
    result = load_json(point_folder(run, point.id) / "result.json", ProofResult)
    speed = selection.site.site.network_gbit_s if selection.site else None
    return Proof(
        bus_gb_s=result.bus_gb_s,
        transport=_transport(log_folder(run, point.id)) or _gloo(done.allocation.reports.values()),
        nodes=done.allocation.nodes,
        share=result.bus_gb_s * 8 / speed if speed else None,
    )


def _selection(project: Project, site: str, engine: str | None) -> Selection:
    """Return two nodes of a site with a stack that any recipe has for them; raises InputError for none."""
    load_site(project.root, site)
    error: InputError | None = None
    for name in project.recipe_names:
        request = Request(recipe=name, cluster=site, engine=engine, settings=(f"nodes={NODES}",))
        try:
            return select(project, request)
        except InputError as refused:
            error = error or refused
    assert error is not None, "a project has a recipe"
    raise error


def _transport(logs: Path) -> str:
    """Return what the collectives say that they use; empty where they say nothing."""
    for file in (*sorted(logs.rglob("stdout.log")), *sorted(logs.rglob("stderr.log"))):
        if found := _NETWORK.search(file.read_text(encoding="utf-8", errors="replace")):
            return found[1].strip()
    return ""


def _gloo(reports: Iterable[NodeReport]) -> str:
    """Return the interfaces that Gloo was told to use."""
    names = {one.transport.get("GLOO_SOCKET_IFNAME", "") for one in reports}
    return f"TCP over {', '.join(sorted(filter(None, names))) or 'an interface of its choice'}"
