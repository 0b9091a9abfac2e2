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

    def run(script: Script, **size: int) -> Allocation | None:
        ranks = commands_of(FakeEngine(script, workspace), workspace, EXTRA="1")
        placement = PlacementStandIn(**size)  # type: ignore[arg-type]
        out = str(point_folder(workspace.run, placement.id))
        job: Any = RankJob(out=out, metrics=str(workspace.run / METRICS))
        return ranks.run(Launch(placement=placement, script=workspace.root / "train.py", job=job), show=show)

    return run


def playing(**play: Any) -> Script:
    return Script(play=lambda job: Play(**play))


def line(step: int, point: str = "here") -> Mapping[str, Any]:
    return {"point": point, "step": step}


def test_lines_are_shown_and_the_hosts_of_the_ranks_are_the_allocation(
    drive: Drive, shown: list[dict[str, Any]], workspace: Workspace
) -> None:
    """Not those of another attempt, nor a torn one; nothing of an earlier attempt is kept."""
    late = json.dumps({"attempt": "earlier", **line(9)}) + "\n"
    lines = [line(1, "there"), late, "a warning of some library\n", line(1), line(2), '{"point": "he']
    script = playing(lines=lines, hosts=["b", "b", "a"], result={})
    result = drive(script)
    assert result is not None
    assert (result.scheduler, result.nodes, script.stopped) == ("local", ("b", "a"), 1)
    assert script.started[0].variables["EXTRA"] == "1"
    assert shown == [line(1, "there"), line(1), line(2)]
    drive(playing(lines=[line(1)], hosts=["c"]))
    kept = [json.loads(one) for one in (workspace.run / METRICS).read_text().splitlines()]
    assert [(one["point"], one["step"]) for one in kept] == [("there", 1), ("here", 1)]
    folder = point_folder(workspace.run, "here")
    assert not (folder / "result.json").exists()
    assert [path.name for path in (folder / "ranks").iterdir()] == ["0.json"]


def stops(job: Mapping[str, Any]) -> Play:
    """Play ranks that were told to end and have saved."""
    (Path(job["out"]) / STOPPED_FILE).write_text('{"step": 12}')
    return Play(log=torchrun_report(1, 5), status=1)


def hangs(job: Mapping[str, Any]) -> Play:
    """Play ranks that made no progress, one of which torchrun names."""
    for rank in range(2):
        words = {"rank": rank, "host": "b", "pid": 7, "step": 3, "operation": "forward", "limit": 9.9}
        file = Path(job["out"], "pulse", f"{rank}.json")
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(words | {"since": 5 - rank}))
    return Play(log="Timeout (0:00:09.9)!\n" + torchrun_report(0, -9), status=1)


def plays(**play: Any) -> Callable[[Mapping[str, Any]], Play]:
    return lambda _job: Play(**play)


# What two ranks do, and the error with its message and what was found.
ENDS: list[tuple[Callable[[Mapping[str, Any]], Play], type[BaseException], str]] = [
    (plays(log=torchrun_report(1, -9), status=1), RunError, "here: rank 1 of 2 failed with signal 9"),
    (plays(log="no such module\n", status=3), RunError, "could not be started or ended with exit status 3"),
    (plays(log="no such module\n", status=3), RunError, "no such module"),
    (stops, RunInterruptedError, "told to end and have saved after step 12"),
    (hangs, RunError, "made no progress for 10 s"),
    (hangs, RunError, "rank 1 on b, pid 7, at step 3: forward"),
    (plays(lines=[line(1)], interrupted=KeyboardInterrupt()), KeyboardInterrupt, ""),
    (plays(lines=[line(1)], interrupted=MachineError("the daemon is gone")), MachineError, "daemon is gone"),
]


@pytest.mark.parametrize(("play", "kind", "said"), ENDS)
def test_how_a_launch_ended_is_told_and_nothing_is_left(
    drive: Drive, play: Callable[[Mapping[str, Any]], Play], kind: type[BaseException], said: str
) -> None:
    script = Script(play=play)
    with pytest.raises(kind) as caught:
        drive(script, devices_per_node=2)
    assert said in str(caught.value)
    assert script.stopped == 1


def test_a_device_without_memory_is_no_error(drive: Drive) -> None:
    assert drive(playing(log=torchrun_report(0, 77), status=1)) is None


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
        drive(script, devices_per_node=3)
    assert expected in str(caught.value)
    assert "leave that node out with `exclude`" in str(caught.value)
    assert (shown, script.stopped) == ([], 1)


def test_what_cannot_be_started_is_told(drive: Drive) -> None:
    script = playing()
    with pytest.raises(MachineError, match="this machine is one node") as caught:
        drive(script, nodes=2)
    assert "here needs 2 nodes" in str(caught.value)
    script.starting = MachineError("cannot start")
    with pytest.raises(MachineError, match="cannot start"):
        drive(script)
    assert (script.started, script.stopped) == ([], 0)


def test_what_runs_here_is_followed_to_its_end(workspace: Workspace) -> None:
    engine, here = Interpreter(python=sys.executable, workspace=workspace), load_scheduler("local")
    words = (sys.executable, "-c", "import os; print(os.environ['NAME']); raise SystemExit(7)")
    command = NodeCommand(arguments=words, variables={"NAME": "given"}, folder=Path("/"))
    task, logs = Task(point="here", nodes=1, ranks_per_node=1, commands=(command,)), workspace.run / "log"
    job = here.submit(task, run=workspace.run, logs=logs, start=engine.start)
    until(lambda: job.poll() is not None, pause=0.02)
    assert (job.poll(), job.nodes, here.unusable(nodes=1)) == (7, (platform.node(),), None)
    assert here.unusable(nodes=32) == "the plan has points of up to 32 nodes"
    assert job.logs()[0].read_text(encoding="utf-8") == "given\n"
    job.cancel()


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda: load_engine("dockr"), "did you mean"),
        (lambda: load_launcher("torchrum"), "did you mean"),
        (lambda: load_scheduler("locl"), "did you mean"),
        (lambda: load_scheduler("local", site=SITE), "this machine is no site"),
        (lambda: load_scheduler("slurm"), "slurm is at a site"),
    ],
)
def test_unknown_parts_are_refused_and_a_scheduler_and_a_site_fit(
    load: Callable[[], object], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        load()
    assert message in str(caught.value)
