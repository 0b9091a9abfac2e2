"""Legs and what they go on from: refused before anything starts, with both sides, and nothing overwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.writing import write
from tests.records import plan
from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.manifest import FORMAT
from twinrun.foundation.errors import InputError, MachineError, TwinrunError
from twinrun.planning.plan import Plan
from twinrun.protocol.job import Checkpointing
from twinrun.runs.checkpointing import checkpointing_of, resolved
from twinrun.workloads import load_workload
from twinrun.workloads.sweep import refuse
from twinrun.workloads.workload import Hardware, PlanDescription

RECIPE, TRAINING = "mpt1b-convergence", load_workload("training")


def legs(leg: int | None = None, *settings: str) -> Plan:
    return plan(RECIPE, scale="smoke", gpu=None, leg=leg, settings=settings)


def described(made: Plan) -> PlanDescription:
    return TRAINING.describe(made.part, made.points)


def saved(place: Path, changes: dict[str, str] | None = None) -> Path:
    """Leave the checkpoint that leg 1 ends with, of a run with other settings where `changes` says so."""
    store = FolderStore(place / "checkpoints" / "leg=1")
    identity = dict(described(legs()).identity) | (changes or {}) | {"data": "d" * 64}
    write(store, step=20, token=store.claim("test"), identity=identity)
    return place


def found(made: Plan, source: Path | None = None, *texts: str, resume: bool = False) -> Any:
    asked = checkpointing_of(texts, workload=TRAINING, plan=made, source=str(source) if source else None)
    return asked, resolved(asked, made, run=Path("run"), resume=resume)


def check(source: Path, made: Plan | None = None) -> None:
    found(made or legs(2), source)


def test_a_run_in_legs_is_one_of_points_that_go_on_from_each_other() -> None:
    asked, points = found(legs())
    assert asked == Checkpointing(steps=60, mode="bounded")
    assert {name: tuple(one) for name, one in points.items()} == {
        "devices=1": ("run/checkpoints/devices=1", None, None),
        "leg=1": ("run/checkpoints/leg=1", None, 0),
        "leg=2": ("run/checkpoints/leg=2", "run/checkpoints/leg=1", 20),
        "leg=last": ("run/checkpoints/leg=last", "run/checkpoints/leg=2", 40),
    }


def test_ranks_see_the_folder_of_another_run(tmp_path: Path) -> None:
    asked, points = found(legs(2), saved(tmp_path))
    (one,) = points.values()
    seen = one.seen(asked, lambda path: f"seen/{path.name}")
    assert (seen.place, seen.source, seen.begin) == ("seen/leg=2", "seen/leg=1", 20)


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/leg=1"])
def test_a_leg_goes_on_from_a_run_folder_or_what_is_in_it(tmp_path: Path, inside: str) -> None:
    check(saved(tmp_path) / inside)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"shape.width": "128"}, "shape.width"),
        ({"shape.vocabulary": "50368"}, "shape.vocabulary"),
        ({"seed": "18"}, "seed"),
        ({"global_batch": "32"}, "global_batch"),
        ({"optimizer.learning_rate": "0.1"}, "optimizer.learning_rate"),
        ({"optimizer.unheard_of": "1"}, "optimizer.unheard_of"),
        ({"precision": "bf16"}, "precision"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, changes: dict[str, str], field: str) -> None:
    with pytest.raises(InputError, match="the checkpoint is of another run") as raised:
        check(saved(tmp_path, changes))
    (theirs,) = changes.values()
    ours = described(legs()).identity.get(field, "nothing")
    assert raised.value.place is not None
    assert raised.value.place.endswith(f"leg=1/step-00000020/manifest.json:{field}")
    assert (raised.value.found, raised.value.allowed) == (theirs, f"{ours}, that of this run")


def test_a_leg_out_of_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leg 3 goes on after step 40") as raised:
        check(saved(tmp_path) / "checkpoints" / "leg=1", legs(3))
    assert raised.value.found == "checkpoints after step 20"
    assert raised.value.allowed == "one after step 40, where leg 2 ends"


def test_a_folder_that_has_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint here"):
        check(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    write(store, step=20, token=store.claim("test"), version=FORMAT + 1)
    with pytest.raises(InputError, match="format"):
        check(tmp_path)


def test_half_a_checkpoint_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "checkpoints" / "leg=1" / "step-00000020" / "manifest.json").write_text('{"content": {')
    with pytest.raises(TwinrunError, match="manifest") as raised:
        check(tmp_path)
    assert raised.value.exit_code == 4


def test_a_leg_given_twice_overwrites_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(InputError, match="leg 1 was run before; nothing is overwritten") as raised:
        found(legs(1), None, f"place={tmp_path}/checkpoints")
    assert raised.value.found == "a checkpoint after step 20"
    found(legs(1), None, f"place={tmp_path}/checkpoints", resume=True)


@pytest.mark.parametrize(
    ("leg", "source", "expected"),
    [
        (2, None, "leg 2 goes on after step 20"),
        (1, "somewhere", "nothing here goes on from another run"),
        (None, "somewhere", "nothing here goes on from another run"),
    ],
)
def test_a_source_belongs_to_a_later_leg(leg: int | None, source: str | None, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        checkpointing_of((), workload=TRAINING, plan=legs(leg), source=source)


@pytest.mark.parametrize("leg", [0, 4])
def test_a_leg_that_is_not_there_is_refused(leg: int) -> None:
    with pytest.raises(InputError, match="no such leg") as raised:
        legs(leg)
    assert raised.value.allowed == "1 to 3"


def test_a_recipe_without_legs_has_no_leg() -> None:
    with pytest.raises(InputError, match="no such leg"):
        plan("mpt7b-scaling", scale="smoke", gpu=None, leg=1)


def test_legs_are_the_steps_of_the_run() -> None:
    with pytest.raises(InputError, match="not the steps of the run") as raised:
        legs(None, "steps=80")
    assert (raised.value.found, raised.value.allowed) == ("60 steps", "80, the setting `steps`")


def test_a_leg_of_another_vendor_is_for_another_machine() -> None:
    made = plan(RECIPE, scale="paper", gpu="a100-40gb", devices=8)
    assert [point.id for point in made.points] == [
        "nodes=1",
        *(f"leg={number}" for number in range(1, 5)),
        "leg=last",
    ]
    hardware = Hardware(
        gpu=None, device_memory_bytes=None, devices=8, cores=2, vendor="cuda", processor="cpu"
    )
    with pytest.raises(MachineError, match="a leg for hardware of another vendor") as raised:
        refuse(TRAINING, made.description.points, made.points, scale="paper", hardware=hardware, here=True)
    assert (raised.value.found, raised.value.allowed) == ("cuda", "rocm")
    assert raised.value.hint is not None
    assert "--leg 2 --from" in raised.value.hint
    alone = plan(RECIPE, scale="paper", gpu="a100-40gb", devices=8, leg=3)
    refuse(TRAINING, alone.description.points, alone.points, scale="paper", hardware=hardware, here=True)


def test_on_a_machine_with_a_gpu_a_leg_may_be_on_its_processor() -> None:
    made = plan(RECIPE, scale="node", gpu="h200", devices=1)
    on_processor = [point.part.leg.processor for point in made.points if point.part.leg]
    assert on_processor == [False, True] * 3
