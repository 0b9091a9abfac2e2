"""What a run uses where the user leaves it open, on machines that are not this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.records import PROJECT, RECIPE
from tests.records import machine as host
from twinrun.execution.schedulers.slurm import Slurm
from twinrun.foundation.errors import InputError, MachineError
from twinrun.machine.inventory import processor
from twinrun.protocol.allocation import Machine
from twinrun.runs import selection
from twinrun.runs.prepared import prepare
from twinrun.runs.selection import Request, Selection, select

GIB = 1 << 30
H200, PUBLISHED = PROJECT.gpus["h200"], PROJECT.gpus["mi250"]
AS_PUBLISHED = ("paper", PUBLISHED.vendor, PUBLISHED.id)

SITE = f"""
[site.big]
scheduler = "slurm"
engine = "venv"
vendor = "{H200.vendor}"
gpu = "h200"
nodes = NODES
devices_per_node = 8
gres = "gpu"
cores_per_node = 96
shared = ["/shared"]
"""


def machine(*memories: int) -> Machine:
    """Return a machine with an H200 for each number of bytes, or without a GPU."""
    there = host(H200.vendor, H200, devices=len(memories)) if memories else host(processor(PROJECT.root))
    pairs = zip(there.devices, memories, strict=True)
    devices = tuple(one.model_copy(update={"memory_bytes": memory}) for one, memory in pairs)
    return there.model_copy(update={"devices": devices})


def selected(patch: pytest.MonkeyPatch, there: Machine, **request: Any) -> Selection:
    """Return what a request selects on a machine."""
    patch.setattr(selection, "detect", lambda root, vendor=None: there)
    return select(PROJECT, Request(**{"recipe": RECIPE, "engine": "host", **request}))


@pytest.mark.parametrize(
    ("memories", "asked", "plan", "name", "why"),
    [
        ((), {}, ("smoke", "cpu", None), "scale", "no GPU in use"),
        ((140,), {}, ("node", H200.vendor, "h200"), "scale", "the machine has GPUs"),
        ((140,), {"scale": "paper", "dry": True}, ("paper", H200.vendor, "h200"), "vendor", "1 x "),
        ((), {"scale": "paper", "dry": True}, AS_PUBLISHED, "vendor", "this is only a plan"),
    ],
)
def test_what_is_left_open_is_as_the_machine_or_as_published(
    monkeypatch: pytest.MonkeyPatch,
    memories: tuple[int, ...],
    asked: dict[str, Any],
    plan: tuple[str | None, ...],
    name: str,
    why: str,
) -> None:
    found = selected(monkeypatch, machine(*(one * GIB for one in memories)), **asked)
    assert (found.plan.scale, found.plan.vendor, found.plan.gpu) == plan
    assert found.hardware.devices == len(memories)
    assert why in next(one.because for one in found.choices if one.name == name)


def test_the_smallest_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = {"set": ("model=mpt-7b", "devices=2"), "scale": None}
    large = selected(monkeypatch, machine(140 * GIB, 140 * GIB), **choices).plan
    mixed = selected(monkeypatch, machine(140 * GIB, 80 * GIB), **choices).plan
    first, second = (max(one.points[-1].part.microbatches) for one in (large, mixed))
    assert first > second


@pytest.mark.parametrize(("vendor", "arch"), [("rocm", "gfx1100"), ("cuda", "sm_120"), ("cuda", "sm_70")])
def test_a_gpu_that_no_stack_is_built_for_is_refused_and_may_be_asked_for(
    vendor: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (device, *_) = machine(80 * GIB).devices
    other = device.model_copy(update={"arch": arch, "gpu": None, "name": "another"})
    there = machine(80 * GIB).model_copy(update={"vendor": vendor, "devices": (other,)})
    with pytest.raises(MachineError, match="no stack of this recipe is built for this GPU") as caught:
        selected(monkeypatch, there)
    assert caught.value.found == f"{arch} (another)"
    assert "--stack" in str(caught.value.hint)
    current = PROJECT.recipe("recipes/mpt7b-scaling").recipe.stacks.current[vendor]
    assert selected(monkeypatch, there, stack=current, engine="venv").stack.stack.name == current
    with pytest.raises(InputError, match="the stack is for another vendor"):
        selected(monkeypatch, there, stack="cpu")


def with_site(monkeypatch: pytest.MonkeyPatch, folder: Path, nodes: int, more: str = "") -> None:
    file = folder / "cluster.toml"
    file.write_text(SITE.replace("NODES", str(nodes)) + more, encoding="utf-8")
    monkeypatch.setenv("TWINRUN_CLUSTER", str(file))


@pytest.mark.parametrize(("nodes", "up", "most"), [(32, 64, 32), (31, 64, 16), (32, 4, 4)])
def test_a_site_runs_the_points_that_its_jobs_get(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: int, up: int, most: int
) -> None:
    with_site(monkeypatch, tmp_path, nodes)
    monkeypatch.setattr(Slurm, "size", lambda self: up)
    request = {"cluster": "big", "scale": "paper", "set": ("microbatch=1",)}
    found = selected(monkeypatch, machine(), **request)
    assert max(point.nodes for point in found.plan.points) == most
    left = [choice.value for choice in found.choices if choice.name == "left out"]
    assert ("nodes=32" in "".join(left)) is (most < 32)
    with pytest.raises(MachineError):
        selected(monkeypatch, machine(), **request | {"set": ("microbatch=1", "nodes=64")})


def test_a_users_own_image_is_run_in_place_of_the_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = selected(monkeypatch, machine(), engine=None, image="vendor/pytorch:25.10", dry=True)
    assert (found.plan.engine, found.plan.image) == ("docker", "vendor/pytorch:25.10")
    printed = prepare(PROJECT, found, dry=True).printed()["commands"]
    words = printed["devices=1"][0]["arguments"]  # type: ignore[index]
    assert "vendor/pytorch:25.10" in words
    with pytest.raises(InputError, match="runs no image by its name"):
        selected(monkeypatch, machine(), engine="venv", image="vendor/pytorch:25.10")


def test_time_is_said_with_its_upper_end_and_what_nobody_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_site(monkeypatch, tmp_path, 32, "minutes = 1\nnetwork_gbit_s = 400\n")
    few = {"set": ("nodes=1,2",), "dry": True}
    found = selected(monkeypatch, machine(), cluster="big", scale="paper", **few)
    values = {one.name: one for one in found.choices}
    assert " at most " in values["time"].value
    assert " at most " in values["node hours"].value
    assert "takes up to" in values["limit"].because
