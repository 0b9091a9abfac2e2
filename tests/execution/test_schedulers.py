from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

import pytest

from tests.execution.placements import SITE
from twinrun.execution.engine import NodeCommand, ProcessGroup, Workspace
from twinrun.execution.interpreter import Interpreter
from twinrun.execution.schedulers import load_scheduler
from twinrun.execution.schedulers.local import Local, LocalSubmission
from twinrun.execution.task import Task
from twinrun.foundation.errors import InputError, MachineError

SECONDS = 30


def start(command: NodeCommand, log: Path) -> ProcessGroup:
    workspace = Workspace(root=command.folder, run=command.folder, data=command.folder)
    return Interpreter(python=sys.executable, workspace=workspace).start(command, log=log)


def command(folder: Path, program: str) -> NodeCommand:
    return NodeCommand(arguments=(sys.executable, "-c", program), variables={"NAME": "given"}, folder=folder)


def submitted(folder: Path, program: str) -> LocalSubmission:
    return Local().submit(task(command(folder, program)), run=folder, logs=folder / "log", start=start)


def task(*commands: NodeCommand) -> Task:
    return Task(point="here", nodes=len(commands), ranks_per_node=1, commands=commands)


def test_a_scheduler_and_a_site_fit() -> None:
    with pytest.raises(InputError, match="this machine is no site"):
        load_scheduler("local", site=SITE)
    with pytest.raises(InputError, match="Slurm is at a site"):
        load_scheduler("slurm")


def test_this_machine_is_one_node(tmp_path: Path) -> None:
    here = Local()
    assert here.unusable(nodes=1) is None
    assert here.unusable(nodes=32) == "the plan has points of up to 32 nodes"
    two = task(command(tmp_path, "pass"), command(tmp_path, "pass"))
    assert here.script(two, run="/run", logs="/log") is None
    with pytest.raises(MachineError, match="this machine is one node") as caught:
        here.submit(two, run=tmp_path, logs=tmp_path / "log", start=start)
    assert caught.value.place == "--scheduler local"
    assert not (tmp_path / "log").exists()


def test_a_command_is_followed_to_its_end(tmp_path: Path) -> None:
    submission = submitted(tmp_path, "import os; print(os.environ['NAME']); raise SystemExit(7)")
    deadline = time.monotonic() + SECONDS
    while (status := submission.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert status == 7
    assert submission.nodes == (platform.node(),)
    (log,) = submission.logs()
    assert log.read_text(encoding="utf-8") == "given\n"
    submission.cancel()
