"""Ranks that stay for the next point: what they import once, and what no point sees of another."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")

from tests.checkouts import ROOT
from tests.execution.placements import PlacementStandIn
from twinrun.execution.engine import Workspace, log_folder, point_folder
from twinrun.execution.launchers import load_launcher
from twinrun.execution.local_engines import Interpreter
from twinrun.execution.ranks import METRICS, Launch, RankCommands, Ranks
from twinrun.execution.schedulers import load_scheduler
from twinrun.foundation.errors import RunError
from twinrun.foundation.manifest import load_json
from twinrun.protocol.job import Job, Result

SIZE = 2
# Each point leaves a variable, another seed and a group behind, and says what it has found of those before.
SCRIPT = """
import os
import signal
from pathlib import Path

import torch

from twinrun.protocol.job import Job, Result
from twinrun.train import ranks, worker

with Path(__file__).with_suffix(".imports").open("a") as stream:
    stream.write("imported\\n")


def work(job):
    ranks.join(job)
    if job.recipe == "killed" and ranks.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = {"left": os.environ.get("LEFT", ""), "seed": str(torch.initial_seed())}
    os.environ["LEFT"] = job.point
    torch.manual_seed(ranks.rank())
    (largest,) = ranks.largest([ranks.rank()], torch.device("cpu"))
    print(job.point, largest)
    return Result(point=job.point, device_name="cpu", libraries=found)


worker.run(work, Job)
"""


class Points:
    """Points of one script, on ranks that stay."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace(root=ROOT, run=folder / "run", data=folder / "data")
        self._script = folder / "points.py"
        self._script.write_text(SCRIPT)
        engine = Interpreter(python=sys.executable, workspace=self.workspace)
        self.ranks = Ranks(
            engine=engine,
            commands=RankCommands(
                renderer=engine,
                launcher=load_launcher("torchrun"),
                scheduler=load_scheduler("local"),
                workspace=self.workspace,
                cores=SIZE,
                variables={},
            ),
        )

    def run(self, point: str, recipe: str = "well") -> tuple[tuple[str, ...], dict[str, str]]:
        """Run a point; return its processes, and what it has found of those before."""
        run = self.workspace.run
        job = Job(
            recipe=recipe,
            point=point,
            world_size=SIZE,
            accelerator=False,
            out=str(point_folder(run, point)),
            metrics=str(run / METRICS),
            attempt="",
        )
        launch = Launch(
            placement=PlacementStandIn(id=point, devices_per_node=SIZE), script=self._script, job=job
        )
        launched = self.ranks.run(launch, stay=True, show=lambda _line: None)
        assert launched is not None
        result = load_json(point_folder(run, point) / "result.json", Result)
        return launched.processes, result.libraries

    def imports(self) -> int:
        """Return how many processes have imported the script."""
        return len(self._script.with_suffix(".imports").read_text().splitlines())


@pytest.fixture
def points(tmp_path: Path) -> Iterator[Points]:
    made = Points(tmp_path)
    with contextlib.closing(made.ranks):
        yield made


def test_points_share_imports_and_nothing_else(points: Points) -> None:
    two = [points.run(f"a{number}") for number in range(2)]
    assert points.imports() == SIZE
    with pytest.raises(RunError, match="rank 1 of 2 failed with signal 9"):
        points.run("b", "killed")
    four = [points.run(f"c{number}") for number in range(4)]
    assert points.imports() == 2 * SIZE

    for run in (two, four):
        ranks = [[one.partition(", a fork of ") for one in processes] for processes, _ in run]
        assert all(one == other for one, other in pairwise([[of for _, _, of in row] for row in ranks]))
        assert len({number for row in ranks for number, _, _ in row}) == SIZE * len(run)
    found = [one for _, one in (*two, *four)]
    assert {one["left"] for one in found} == {""}
    assert len({one["seed"] for one in found}) == len(found)
    printed = [log.read_text() for log in log_folder(points.workspace.run, "c3").rglob("stdout.log")]
    assert printed == ["c3 1.0\n"] * SIZE

    points.ranks.close()
    for processes, _ in four:
        assert not any(Path(f"/proc/{one.rpartition(' ')[2]}").exists() for one in processes)
