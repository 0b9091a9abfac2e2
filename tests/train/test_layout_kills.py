"""A rank of each layout is killed: it is named with its host and its step, and no process is left."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streaming", reason="needs the packages of a stack")

from tests.execution.placements import PlacementStandIn
from tests.train.small import LAYOUTS as SCRIPT
from tests.train.small import ROOT, SHAPE, MakeJob
from twinrun.execution.engine import Workspace, point_folder
from twinrun.execution.engines import Interpreter
from twinrun.execution.failures import rank_states
from twinrun.execution.launchers import load_launcher
from twinrun.execution.ranks import METRICS, Launch, Ranks
from twinrun.execution.schedulers import load_scheduler
from twinrun.foundation.errors import RunError
from twinrun.protocol.layout import PROCESSOR_RANKS, Layout

RECIPE = ROOT / "recipes" / "deepspeed-pretrain"
MANIFEST: dict[str, Any] = tomllib.loads((RECIPE / "recipe.toml").read_text(encoding="utf-8"))
LAYOUTS = {
    name: Layout(**{"framework": "deepspeed", **MANIFEST["layouts"][name]})
    for name in MANIFEST["scales"]["smoke"]["sweep"]["layouts"]
}
# By PyTorch alone and by DeepSpeed's pipeline for every change, all others by night.
QUICK = ("ddp", "pp2")
# More than a trial lasts.
STEPS, KILLED_AT, WATCHDOG_SECONDS = 100_000, 3, 20.0


def trials() -> list[Any]:
    marks = {
        name: [pytest.mark.needs("deepspeed")] if layout.framework == "deepspeed" else []
        for name, layout in LAYOUTS.items()
    }
    nightly = [pytest.mark.trials]
    return [
        pytest.param(layout, id=name, marks=marks[name] + ([] if name in QUICK else nightly))
        for name, layout in LAYOUTS.items()
    ]


@pytest.mark.parametrize("layout", trials())
def test_a_rank_that_is_killed_is_named(make_job: MakeJob, tmp_path: Path, layout: Layout) -> None:
    world = layout.devices or PROCESSOR_RANKS
    placement = PlacementStandIn(devices_per_node=world)
    folder = point_folder(tmp_path, placement.id)
    shape = SHAPE.model_copy(update={"experts": 4}) if layout.variant else SHAPE
    made = make_job(world_size=world, sharding="none", shape=shape, steps=STEPS)
    fields = {"point": placement.id, "out": str(folder), "metrics": str(tmp_path / METRICS)}
    job = made.model_copy(update={**fields, "layout": layout, "watchdog_seconds": WATCHDOG_SECONDS})
    victim, killed = world - 1, list[float]()

    def kill(_: bytes) -> None:
        # A rank says where it is once a second, and its first steps take less.
        state = rank_states(folder)[victim]
        if not killed and state.step >= KILLED_AT:
            os.kill(state.pid, signal.SIGKILL)
            killed.append(time.monotonic())

    with pytest.raises(RunError) as caught:
        ranks(tmp_path).run(Launch(placement=placement, script=SCRIPT, job=job), show=kill)
    assert time.monotonic() - killed[0] < WATCHDOG_SECONDS
    assert caught.value.exit_code == 4
    pid, host = rank_states(folder)[victim].pid, re.escape(platform.node())
    where = rf"rank {victim} on {host}, pid {pid}, at step \d+: \w"
    said = rf"rank {victim} of {world} failed with signal 9\n.*{where}"
    assert re.search(said, str(caught.value)), caught.value
    assert not left(folder)


def ranks(run: Path) -> Ranks:
    workspace = Workspace(root=ROOT, run=run, data=run)
    engine = Interpreter(python=sys.executable, workspace=workspace)
    return Ranks(
        engine=engine,
        launcher=load_launcher("torchrun"),
        scheduler=load_scheduler("local"),
        workspace=workspace,
        cores=1,
        variables={},
    )


def left(folder: Path) -> list[str]:
    """Return the commands of processes that still work for the job in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in command:
                found.append(command)
    return found
