"""Commands as text: two nodes as golden files, and lines that a shell runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from tests.execution.placements import PlacementStandIn
from tests.goldens import check_golden, laid_out
from twinrun.execution.containers import Docker
from twinrun.execution.engine import Engine, NodeCommand, Workspace
from twinrun.execution.image_file import Apptainer
from twinrun.execution.interpreter import Interpreter
from twinrun.execution.launchers import Rendezvous, load_launcher
from twinrun.execution.ranks import Launch, RankCommands
from twinrun.execution.schedulers import load_scheduler
from twinrun.execution.shell import RUN_FOLDER, set_run_folder, shell_line, word
from twinrun.manifests.vendor import Vendor, load_vendors
from twinrun.runs.prepared import PASTED, prepare_line

ROOT = Path(__file__).resolve().parents[2]
# Of the other vendors it is told what differs.
WHOLE = "rocm"
SECONDS = 120
TWO_NODES = PlacementStandIn(id="nodes=2", nodes=2, devices_per_node=4)
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

# Says where it ran, and what it was told.
SCRIPT = """
import argparse, json, os, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--job", type=pathlib.Path)
job = json.loads(parser.parse_args().job.read_text())
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "TOLD")
facts = {name: os.environ[name] for name in names}
pathlib.Path(job["out"], facts["RANK"] + ".json").write_text(json.dumps({"text": job["text"], **facts}))
"""
# What a shell would replace or split.
TRICKY = "a 'quoted' \"text\" with $HOME, `date`, \\ and a\nline"


class PlanJob(BaseModel):
    """The least that a job has."""

    out: str
    text: str = TRICKY


class Rendered(NamedTuple):
    """The command of a node, and the line that a shell there runs."""

    command: NodeCommand
    line: str


def rendered(
    placement: PlacementStandIn, renderer: Engine, workspace: Workspace
) -> dict[str, tuple[Rendered, ...]]:
    commands = RankCommands(
        renderer=renderer,
        launcher=load_launcher("torchrun"),
        scheduler=load_scheduler("local"),
        workspace=workspace,
        cores=32,
        variables={"TOLD": TRICKY},
    )
    job: Any = PlanJob(out=renderer.inside(workspace.run / "points" / placement.id))
    launch = Launch(placement=placement, script=workspace.root / "train.py", job=job)
    nodes = commands.task(launch, attempt=PASTED).commands
    lines = (f"{prepare_line(launch)} && {shell_line(one)}" for one in nodes)
    return {placement.id: tuple(map(Rendered, nodes, lines))}


def anywhere(root: Path) -> Workspace:
    return Workspace(root=root, run=RUN_FOLDER, data=Path("/data"))


def two_nodes(engine: str, vendor: Vendor) -> str:
    """Return what two nodes of a cluster start, whatever this machine is."""
    workspace = anywhere(Path("/project"))
    renderer: Engine = Interpreter(python="/environment/bin/python", workspace=workspace)
    if engine == "docker":
        # The groups of device files are this machine's.
        container = vendor.container.model_copy(update={"groups_of": ()})
        vendor = vendor.model_copy(update={"container": container, "hidden_by": ()})
        renderer = Docker(image="twinrun/stack:0123456789ab", vendor=vendor, workspace=workspace)
    if engine == "apptainer":
        renderer = Apptainer(file=Path("/shared/stack.sif"), vendor=vendor, workspace=workspace)
    found = rendered(TWO_NODES, renderer, workspace)
    shown = {
        point: [
            {"arguments": list(one.arguments), "variables": one.variables, "line": line}
            for one, line in nodes
        ]
        for point, nodes in found.items()
    }
    return laid_out(shown) + "\n"


CASES = [(engine, name) for engine in ("apptainer", "docker") for name in sorted(load_vendors(ROOT))]
CASES += [("venv", "cpu")]


@pytest.mark.parametrize(("engine", "vendor"), CASES)
def test_two_nodes_are_the_golden_ones(engine: str, vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    monkeypatch.setattr(os, "getgid", lambda: 1234)
    monkeypatch.setenv("TWINRUN_CACHE", "/cache")
    monkeypatch.setattr("twinrun.execution.schedulers.local.Local.first_node", lambda self: "node17")
    like = "" if vendor == WHOLE or engine == "venv" else f"two-nodes-{engine}-{WHOLE}.json"
    check_golden(
        f"two-nodes-{engine}-{vendor}.json", two_nodes(engine, load_vendors(ROOT)[vendor]), like=like
    )


@pytest.mark.parametrize("text", ["", "plain", TRICKY, "$RUN/points", "a $RUN b $RUN", "--x=$RUN"])
def test_a_word_stays_one_word_with_nothing_but_the_run_folder_replaced(text: str) -> None:
    program = f"RUN='/a b'; printf %s {word(text)}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == text.replace("$RUN", "/a b")


def project(folder: Path) -> Path:
    (folder / "src").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    return folder


@needs_torch
def test_a_pasted_line_runs(tmp_path: Path) -> None:
    workspace = anywhere(project(tmp_path / "a project"))
    placement = PlacementStandIn(id="devices=2", devices_per_node=2)
    found = rendered(placement, Interpreter(python=sys.executable, workspace=workspace), workspace)
    (command,) = found[placement.id]
    run = tmp_path / "a run"
    pasted = "\n".join([set_run_folder(run), command.line, ""])
    subprocess.run(["bash"], input=pasted, text=True, cwd="/", check=True, timeout=SECONDS)
    for rank in range(2):
        facts = json.loads((run / "points" / placement.id / f"{rank}.json").read_text(encoding="utf-8"))
        assert facts == {
            "text": TRICKY,
            "TOLD": TRICKY,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
        }
    assert list((run / "log" / placement.id).rglob("stderr.log"))


@needs_torch
def test_two_nodes_meet_and_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two agents on this machine, the second node's started first."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(
        "twinrun.execution.ranks.Rendezvous",
        lambda **given: Rendezvous(**given | {"port": str(port)}),
    )
    workspace = anywhere(project(tmp_path / "project"))
    placement = PlacementStandIn(id="nodes=2", nodes=2, devices_per_node=1)
    found = rendered(placement, Interpreter(python=sys.executable, workspace=workspace), workspace)
    run = tmp_path / "run"
    with ExitStack() as stack:
        agents = []
        for command in reversed(found[placement.id]):
            pasted = "\n".join([set_run_folder(run), command.line, ""])
            agent = stack.enter_context(subprocess.Popen(["bash", "-c", pasted], cwd="/"))
            stack.callback(agent.kill)
            agents.append(agent)
        assert [agent.wait(SECONDS) for agent in agents] == [0, 0]
    folder = run / "points" / placement.id
    facts = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert [(one["RANK"], one["GROUP_RANK"], one["WORLD_SIZE"]) for one in facts] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
