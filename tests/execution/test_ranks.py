"""Ranks of one launch, driven by an engine that plays their part."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.execution.clusters import until
from tests.execution.fake_engine import FakeEngine, Play, Script, torchrun_report
from tests.execution.placements import SITE, PlacementStandIn, commands_of
from twinrun.execution.engine import NodeCommand, Workspace, point_folder
from twinrun.execution.engines import Interpreter, load_engine
from twinrun.execution.job_script import Task
from twinrun.execution.launchers import load_launcher
from twinrun.execution.ranks import METRICS, Launch
from twinrun.execution.schedulers import load_scheduler
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError
from twinrun.protocol.allocation import Allocation
from twinrun.protocol.job import STOPPED_FILE


class RankJob(BaseModel):
    """The least that a job has."""

    out: str
    metrics: str
    attempt: str = ""


Drive = Callable[..., Allocation | None]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(root=tmp_path / "project", run=tmp_path / "run", data=tmp_path / "data")


@pytest.fixture
def shown() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def drive(workspace: Workspace, shown: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Drive:
    """Return what runs a placement with a script."""
    monkeypatch.setattr("twinrun.execution.ranks.POLL_SECONDS", 0)

    def show(line: bytes) -> None:
        fields = json.loads(line)
        fields.pop("attempt", None)
        shown.append(fields)

    def run(script: Script, placement: PlacementStandIn = PlacementStandIn()) -> Allocation | None:  # noqa: B008 - frozen
        engine = FakeEngine(script, workspace)
        ranks = commands_of(engine, workspace, EXTRA="1")
        folder = point_folder(workspace.run, placement.id)
        job: Any = RankJob(out=str(folder), metrics=str(workspace.run / METRICS))
        launch = Launch(placement=placement, script=workspace.root / "train.py", job=job)
        return ranks.run(launch, show=show)

    return run


def playing(**play: Any) -> Script:
    return Script(play=lambda job: Play(**play))


def line(step: int, point: str = "here") -> Mapping[str, Any]:
    return {"point": point, "step": step}


def test_lines_are_shown_and_the_hosts_of_the_ranks_are_the_allocation(
    drive: Drive, shown: list[dict[str, Any]], workspace: Workspace
) -> None:
    script = playing(lines=[line(1), line(2)], hosts=["b", "b", "a"], result={})
    result = drive(script)
    assert result is not None
    assert (result.scheduler, result.nodes) == ("local", ("b", "a"))
    assert shown == [line(1), line(2)]
    written = [json.loads(one) for one in (workspace.run / METRICS).read_text().splitlines()]
    assert len({one["attempt"] for one in written}) == 1
    (command,) = script.started
    assert command.variables["EXTRA"] == "1"
    assert script.stopped == 1


def test_lines_of_another_attempt_and_what_is_no_line_are_not_shown(
    drive: Drive, shown: list[dict[str, Any]]
) -> None:
    late = json.dumps({"attempt": "earlier", **line(9)}) + "\n"
    drive(playing(lines=[late, "a warning of some library\n", line(1), json.dumps(line(8)) + "\n"]))
    assert shown == [line(1)]


def test_a_torn_line_is_not_shown_and_not_kept(
    drive: Drive, shown: list[dict[str, Any]], workspace: Workspace
) -> None:
    drive(playing(lines=[line(1, "there"), line(1), '{"point": "he']))
    assert shown == [line(1, "there"), line(1)]
    drive(playing(lines=[line(1)]))
    kept = [json.loads(one) for one in (workspace.run / METRICS).read_text().splitlines()]
    assert [(one["point"], one["step"]) for one in kept] == [("there", 1), ("here", 1)]


def test_nothing_of_an_earlier_attempt_is_left(drive: Drive, workspace: Workspace) -> None:
    drive(playing(result={"old": 1}, hosts=["a", "b"]))
    drive(playing(hosts=["c"]))
    folder = point_folder(workspace.run, "here")
    assert not (folder / "result.json").exists()
    assert [path.name for path in (folder / "ranks").iterdir()] == ["0.json"]


def test_a_rank_that_failed_is_named(drive: Drive) -> None:
    script = playing(log=torchrun_report(1, -9), status=1)
    with pytest.raises(RunError, match="rank 1 of 2 failed with signal 9") as caught:
        drive(script, PlacementStandIn(devices_per_node=2))
    assert caught.value.place == "here"
    assert script.stopped == 1


def test_ranks_that_were_told_to_end_and_have_saved_can_go_on(drive: Drive) -> None:
    def play(job: Mapping[str, Any]) -> Play:
        (Path(job["out"]) / STOPPED_FILE).write_text('{"step": 12}')
        return Play(log=torchrun_report(1, 5), status=1)

    with pytest.raises(RunInterruptedError, match="told to end and have saved after step 12") as caught:
        drive(Script(play=play))
    assert caught.value.exit_code == 5


def test_ranks_that_hang_are_told_before_the_one_that_was_killed_first(drive: Drive) -> None:
    def play(job: Mapping[str, Any]) -> Play:
        for rank in range(2):
            words = {"rank": rank, "host": "b", "pid": 7, "step": 3, "operation": "forward", "limit": 9.9}
            file = Path(job["out"], "pulse", f"{rank}.json")
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(words | {"since": 5 - rank}))
        return Play(log="Timeout (0:00:09.9)!\n" + torchrun_report(0, -9), status=1)

    with pytest.raises(RunError, match="made no progress for 10 s") as caught:
        drive(Script(play=play), PlacementStandIn(devices_per_node=2))
    assert "rank 1 on b, pid 7, at step 3: forward" in str(caught.value.found)


def node(**fields: str) -> dict[str, Any]:
    report = {"cpu": "any", "cores": 1, "memory_bytes": 1, "kernel": "6", "devices": [], "driver": None}
    return report | {"interfaces": [], "transport": {}, "software_sha256": "1" * 64} | fields


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"software_sha256": "2" * 64}, "b has packages 222222222222, a has packages 111111111111"),
        ({"image": f"sha256:{'b' * 64}"}, "b has image sha256:bbbbbbbbbbbb, packages 111111111111, a has "),
    ],
)
def test_a_node_with_other_software_is_refused_before_its_first_step(
    drive: Drive, shown: list[dict[str, Any]], other: dict[str, str], expected: str
) -> None:
    nodes = {"a": node(), "b": node(**other), "c": node()}
    script = playing(hosts=["a", "b", "c"], nodes=nodes, lines=[line(1), line(2)])
    with pytest.raises(MachineError, match="the nodes have different software") as caught:
        drive(script, PlacementStandIn(devices_per_node=3))
    assert caught.value.exit_code == 3
    assert expected in str(caught.value)
    assert "leave that node out with `exclude`" in str(caught.value)
    assert shown == []
    assert script.stopped == 1


def test_ranks_that_never_started_are_told_with_the_log(drive: Drive) -> None:
    with pytest.raises(RunError, match="could not be started or ended with exit status 3") as caught:
        drive(playing(log="no such module\n", status=3))
    assert "no such module" in str(caught.value)


def test_a_device_without_memory_is_no_error(drive: Drive) -> None:
    assert drive(playing(log=torchrun_report(0, 77), status=1)) is None


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), MachineError("the daemon is gone")])
def test_an_interruption_ends_the_ranks(drive: Drive, fault: BaseException) -> None:
    script = playing(lines=[line(1)], interrupted=fault)
    with pytest.raises(type(fault)):
        drive(script)
    assert script.stopped == 1


def test_what_cannot_be_started_is_told(drive: Drive) -> None:
    script = playing()
    with pytest.raises(MachineError, match="this machine is one node") as caught:
        drive(script, PlacementStandIn(nodes=2))
    assert "here needs 2 nodes" in str(caught.value)
    script.starting = MachineError("cannot start")
    with pytest.raises(MachineError, match="cannot start"):
        drive(script)
    assert (script.started, script.stopped) == ([], 0)


def test_what_runs_here_is_followed_to_its_end(workspace: Workspace) -> None:
    engine = Interpreter(python=sys.executable, workspace=workspace)
    program = "import os; print(os.environ['NAME']); raise SystemExit(7)"
    words = NodeCommand(
        arguments=(sys.executable, "-c", program), variables={"NAME": "given"}, folder=Path("/")
    )
    task, logs = Task(point="here", nodes=1, ranks_per_node=1, commands=(words,)), workspace.run / "log"
    here = load_scheduler("local")
    job = here.submit(task, run=workspace.run, logs=logs, start=lambda one, log: engine.start(one, log=log))
    until(lambda: job.poll() is not None, pause=0.02)
    assert (job.poll(), job.nodes, here.unusable(nodes=1)) == (7, (platform.node(),), None)
    assert here.unusable(nodes=32) == "the plan has points of up to 32 nodes"
    assert job.logs()[0].read_text(encoding="utf-8") == "given\n"
    job.cancel()


def test_unknown_parts_are_refused_and_a_scheduler_and_a_site_fit() -> None:
    for load, name in ((load_engine, "dockr"), (load_launcher, "torchrum"), (load_scheduler, "locl")):
        with pytest.raises(InputError, match="unknown") as caught:
            load(name)
        assert "did you mean" in str(caught.value)
    with pytest.raises(InputError, match="this machine is no site"):
        load_scheduler("local", site=SITE)
    with pytest.raises(InputError, match="slurm is at a site"):
        load_scheduler("slurm")
