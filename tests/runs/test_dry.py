"""What two nodes of a cluster start, whatever this machine is: argument lists as golden files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.execution.placements import PlacementStandIn
from tests.goldens import check_golden, laid_out
from twinrun.execution.containers import Docker
from twinrun.execution.engine import Engine, Workspace
from twinrun.execution.engines import Apptainer, Interpreter
from twinrun.execution.job_script import RUN_FOLDER
from twinrun.execution.launchers import load_launcher
from twinrun.execution.ranks import Launch, Ranks
from twinrun.execution.schedulers import load_scheduler
from twinrun.manifests.vendor import Vendor, load_vendors
from twinrun.runs.prepared import PRINTED

ROOT = Path(__file__).resolve().parents[2]
# Of the other vendors it is told what differs.
WHOLE = "rocm"
# What a shell would replace or split.
TRICKY = "a 'quoted' \"text\" with $HOME, `date`, \\ and a\nline"


def two_nodes(engine: str, vendor: Vendor) -> str:
    """Return what two nodes of a cluster start."""
    workspace = Workspace(root=Path("/project"), run=RUN_FOLDER, data=Path("/data"))
    renderer: Engine = Interpreter(python="/environment/bin/python", workspace=workspace)
    if engine == "docker":
        # The groups of device files are this machine's.
        container = vendor.container.model_copy(update={"groups_of": ()})
        vendor = vendor.model_copy(update={"container": container, "hidden_by": ()})
        renderer = Docker(image="twinrun/stack:0123456789ab", vendor=vendor, workspace=workspace)
    if engine == "apptainer":
        renderer = Apptainer(file=Path("/shared/stack.sif"), vendor=vendor, workspace=workspace)
    commands = Ranks(
        engine=renderer,
        launcher=load_launcher("torchrun"),
        scheduler=load_scheduler("local"),
        workspace=workspace,
        cores=32,
        variables={"TOLD": TRICKY},
    )
    placement = PlacementStandIn(id="nodes=2", nodes=2, devices_per_node=4)
    # A job is written to its file when it starts.
    unseen: Any = None
    launch = Launch(placement=placement, script=workspace.root / "train.py", job=unseen)
    nodes = commands.task(launch, attempt=PRINTED).commands
    shown = [{"arguments": list(one.arguments), "variables": one.variables} for one in nodes]
    return laid_out({placement.id: shown}) + "\n"


CASES = [(engine, name) for engine in ("apptainer", "docker") for name in sorted(load_vendors(ROOT))]
CASES += [("venv", "cpu")]


@pytest.mark.parametrize(("engine", "vendor"), CASES)
def test_two_nodes_are_the_golden_ones(engine: str, vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    monkeypatch.setattr(os, "getgid", lambda: 1234)
    monkeypatch.setenv("TWINRUN_CACHE", "/cache")
    monkeypatch.setattr("twinrun.execution.schedulers.Local.first_node", "node17")
    like = "" if vendor == WHOLE or engine == "venv" else f"two-nodes-{engine}-{WHOLE}.json"
    check_golden(
        f"two-nodes-{engine}-{vendor}.json", two_nodes(engine, load_vendors(ROOT)[vendor]), like=like
    )
