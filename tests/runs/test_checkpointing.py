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
from twinrun.runs.prepared import checkpointing_of, resolved
from twinrun.workloads import load_workload
from twinrun.workloads.sweep import refuse
from twinrun.workloads.workload import Hardware

RECIPE, TRAINING = "mpt1b-convergence", load_workload("training")
LEG, STEP = Path("checkpoints", "leg=1"), "step-00000020"


def legs(leg: int | None = None, *settings: str) -> Plan:
    return plan(RECIPE, scale="smoke", gpu=None, leg=leg, settings=settings)


def saved(place: Path, changes: dict[str, str] | None = None, **options: Any) -> Path:
    """Leave the checkpoint that leg 1 ends with, of a run with other settings where `changes` says so."""
    store = FolderStore(place / LEG)
    identity = dict(legs().description.identity) | (changes or {}) | {"data": "d" * 64}
    write(store, step=20, token=store.claim("test"), identity=identity, **options)
    return place


def found(made: Plan, source: Path | str | None = None, *texts: str, resume: bool = False) -> Any:
    asked = checkpointing_of(texts, TRAINING, made, source=str(source) if source else None)
    return asked, resolved(asked, made, run=Path("run"), resume=resume)


def test_a_run_in_legs_is_one_of_points_that_go_on_from_each_other() -> None:
    asked, points = found(legs())
    assert asked == Checkpointing(steps=60, mode="bounded")
    assert {name: (one.place, one.source, one.begin) for name, one in points.items()} == {
        "devices=1": ("run/checkpoints/devices=1", None, None),
        "leg=1": ("run/checkpoints/leg=1", None, 0),
        "leg=2": ("run/checkpoints/leg=2", "run/checkpoints/leg=1", 20),
        "leg=last": ("run/checkpoints/leg=last", "run/checkpoints/leg=2", 40),
    }


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/leg=1"])
def test_a_leg_goes_on_from_a_run_folder_or_what_is_in_it(tmp_path: Path, inside: str) -> None:
    _, points = found(legs(2), saved(tmp_path) / inside)
    assert points["leg=2"].source == str(tmp_path / LEG)


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("shape.vocabulary", "50368"),
        ("seed", "18"),
        ("optimizer.unheard_of", "1"),
        ("precision", "bf16"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, field: str, theirs: str) -> None:
    with pytest.raises(InputError, match="the checkpoint is of another run") as raised:
        found(legs(2), saved(tmp_path, {field: theirs}))
    ours = legs().description.identity.get(field, "nothing")
    assert str(raised.value.place).endswith(f"leg=1/{STEP}/manifest.json:{field}")
    assert (raised.value.found, raised.value.allowed) == (theirs, f"{ours}, that of this run")


def test_a_leg_out_of_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leg 3 goes on after step 40") as raised:
        found(legs(3), saved(tmp_path) / LEG)
    assert raised.value.found == "checkpoints after step 20"
    assert raised.value.allowed == "one after step 40, where leg 2 ends"
    with pytest.raises(InputError, match="no checkpoint here"):
        found(legs(2), tmp_path / "checkpoints" / "leg=1" / STEP)


def test_what_is_no_checkpoint_of_this_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="another format") as other:
        found(legs(2), saved(tmp_path, version=FORMAT + 1))
    assert (other.value.found, other.value.allowed) == (FORMAT + 1, FORMAT)
    (tmp_path / LEG / STEP / "manifest.json").write_text('{"content": {')
    with pytest.raises(TwinrunError, match="manifest") as raised:
        found(legs(2), tmp_path)
    assert raised.value.exit_code == 4


def test_a_leg_given_twice_overwrites_nothing(tmp_path: Path) -> None:
    place = f"place={saved(tmp_path)}/checkpoints"
    with pytest.raises(InputError, match="leg 1 was run before; nothing is overwritten") as raised:
        found(legs(1), None, place)
    assert raised.value.found == "a checkpoint after step 20"
    found(legs(1), None, place, resume=True)


@pytest.mark.parametrize(
    ("leg", "source", "texts", "expected"),
    [
        (2, None, (), "leg 2 goes on after step 20"),
        (1, "somewhere", (), "nothing here goes on from another run"),
        (None, None, ("begin=20",), "legs alone have a beginning"),
        (None, None, ("steps",), "expected key=value"),
        (None, None, ("steps=2", "steps=3"), "given twice"),
        (None, None, ("setps=2",), "setps"),
    ],
)
def test_what_legs_do_not_take_is_refused(
    leg: int | None, source: str | None, texts: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        found(legs(leg), source, *texts)


def test_a_leg_is_one_of_the_recipes_and_all_are_the_steps_of_the_run() -> None:
    for leg in (0, 4):
        with pytest.raises(InputError, match="no such leg") as raised:
            legs(leg)
        assert raised.value.allowed == "1 to 3"
    with pytest.raises(InputError, match="no such leg"):
        plan("mpt7b-scaling", scale="smoke", gpu=None, leg=1)
    with pytest.raises(InputError, match="not the steps of the run") as raised:
        legs(None, "steps=80")
    assert (raised.value.found, raised.value.allowed) == ("60 steps", "80, the setting `steps`")


def test_a_leg_of_another_vendor_is_for_another_machine() -> None:
    made = plan(RECIPE, scale="paper", gpu="a100-40gb", devices=8)
    named = [f"leg={number}" for number in range(1, 5)]
    assert [point.id for point in made.points] == ["nodes=1", *named, "leg=last"]
    hardware = Hardware(
        gpu=None, device_memory_bytes=None, devices=8, cores=2, vendor="cuda", processor="cpu"
    )
    known: dict[str, Any] = {"scale": "paper", "hardware": hardware, "here": True}
    with pytest.raises(MachineError, match="a leg for hardware of another vendor") as raised:
        refuse(TRAINING, made.description.points, made.points, **known)
    assert (raised.value.found, raised.value.allowed) == ("cuda", "rocm")
    assert "--leg 2 --from" in str(raised.value.hint)
    alone = plan(RECIPE, scale="paper", gpu="a100-40gb", devices=8, leg=3)
    refuse(TRAINING, alone.description.points, alone.points, **known)
    mixed = plan(RECIPE, scale="node", gpu="h200", devices=1)
    assert [one.part.leg.processor for one in mixed.points if one.part.leg] == [False, True] * 3
