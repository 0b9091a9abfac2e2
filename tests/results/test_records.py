"""A record through its door: what an edit does, what casts a doubt, and what an honest record keeps."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doors import Command
from tests.records import (
    PROJECT,
    RECORDS,
    bench_record,
    finals,
    of_recipe,
    sealed,
    smoke,
    smoke_record,
    training_record,
)
from twinrun.foundation.errors import InputError
from twinrun.report.words import headline
from twinrun.results import reading
from twinrun.results.judge import judged
from twinrun.results.judged import Judged
from twinrun.results.reading import confirmations, read_content, read_record
from twinrun.results.record import MINOR, write_record

Content = dict[str, Any]
RECIPES = sorted(path.stem for path in RECORDS.glob("*.json"))
RATES = {"devices=1": 500.0, "devices=2": 495.0, "devices=4": 490.0}


def training() -> Judged:
    """Return a record of MPT-7B on H200, on which four claims hold."""
    given: Content = {"gpu": "h200", "scale": "node", "settings": ("model=mpt-7b",)}
    return training_record(RATES, spread=0.01, watts=600.0, **given)


def bench() -> Judged:
    times = {"scan-forward-fp16": [0.5] * 500, "scan-backward-fp16": [1.5] * 500}
    settings = ("options.groups=1",)
    return bench_record(times, gpu="mi250", scale="paper", settings=settings)


def content_of(found: Judged) -> Content:
    content: Content = json.loads(found.record.model_dump_json())
    return content


def read(content: Content) -> Judged:
    return judged(read_content(sealed(content), place="record.json"), PROJECT)


def leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the holder and the key of every leaf."""
    for key, one in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield from leaves(one) if isinstance(one, (dict, list)) and one else [(value, key)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_edit_of_any_leaf_is_refused_by_the_digest(recipe: str) -> None:
    content, kept = smoke(recipe), 0
    assert smoke_record(recipe).refusals == ()
    for holder, key in leaves(content):
        before = holder[key]
        holder[key] = before + 1 if isinstance(before, (int, float)) else f"{before}x"
        with pytest.raises(InputError):
            read_content(content, place="record.json")
        holder[key], kept = before, kept + 1
    assert kept > 50


def test_a_leaf_that_is_gone_or_new_is_refused() -> None:
    content = smoke("rmsnorm")
    for changed in ({**content, "speed": 2}, {key: value for key, value in content.items() if key != "plan"}):
        with pytest.raises(InputError):
            read_content(sealed(changed), place="record.json")
    content["points"][0]["result"]["calls"] *= 2
    with pytest.raises(InputError, match="have one name"):
        read_content(sealed(content), place="record.json")


def steps(content: Content, point: int = 0) -> list[Content]:
    found: list[Content] = content["points"][point]["result"]["steps"]
    return found


def scaled(content: Content, name: str, factor: float) -> None:
    for step in (step for number in range(len(content["points"])) for step in steps(content, number)):
        step[name] *= factor


def device(content: Content, **fields: Any) -> None:
    for report in content["allocation"]["reports"].values():
        for one in report["devices"]:
            one.update(fields)


def result(content: Content, **fields: Any) -> None:
    for point in content["points"]:
        point["result"] |= fields


def library(content: Content, version: str) -> None:
    for point in content["points"]:
        point["result"]["libraries"]["torch"] = version


# Alterations with the digest computed anew, that break physics, completeness or the plan.
BROKEN: dict[str, Callable[[Content], object]] = {
    "faster than the peak": lambda one: scaled(one, "seconds", 1 / 3),
    "at 99 % of the peak": lambda one: scaled(one, "seconds", 500 / 980),
    "a step left out": lambda one: steps(one).pop(20),
    "a step twice": lambda one: steps(one).append(steps(one)[-1]),
    "warm-up timed": lambda one: steps(one)[0].update(timed=True),
    "a point left out": lambda one: one["points"].pop(),
    "a point twice": lambda one: one["points"].append(one["points"][-1]),
    "the times of another point": lambda one: [
        mine.update(seconds=other["seconds"]) for mine, other in zip(steps(one), steps(one, 1), strict=True)
    ],
    "another number of parameters": lambda one: result(one, parameters=7),
    "another microbatch": lambda one: result(one, microbatch=77),
    "another parallelism": lambda one: result(one, parallelism="ddp"),
    "0.1 GiB of memory": lambda one: result(one, peak_memory_bytes=1 << 27),
    "more memory than there is": lambda one: result(one, peak_memory_bytes=1 << 38),
    "losses in bits": lambda one: scaled(one, "loss", 1 / math.log(2)),
    "one loss at all steps": lambda one: [step.update(loss=10.9) for step in steps(one)],
    "no losses": lambda one: [step.update(loss=0.0) for step in steps(one)],
    "other data at one point": lambda one: one["points"][0]["result"].update(data_hash="e" * 64),
    "another architecture": lambda one: device(one, arch="sm_80"),
    "another memory": lambda one: device(one, memory_bytes=80 << 30),
    "fewer devices": lambda one: [
        report.update(devices=report["devices"][:1]) for report in one["allocation"]["reports"].values()
    ],
    "hosts that nobody reported": lambda one: one["points"][0].update(hosts=["elsewhere"]),
    "more power than the card draws": lambda one: [step.update(watts=5000.0) for step in steps(one)],
    "less power than an idle card": lambda one: [step.update(watts=1.0) for step in steps(one)],
    "another PyTorch": lambda one: library(one, "1.0.0"),
    "created in 2999": lambda one: one.update(created="2999-01-01T00:00:00+00:00"),
    "before there was code": lambda one: one.update(created="2020-01-01T00:00:00+00:00"),
    "shorter than its steps": lambda one: one.update(created="2026-11-01T00:00:01+00:00"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_physics_completeness_or_the_plan_carries_no_verdict(name: str) -> None:
    found = training()
    content = content_of(found)
    BROKEN[name](content)
    altered = read(content)
    assert altered.refusals, name
    before, after = finals(found), finals(altered)
    lost = [claim for claim, one in after.items() if one != before[claim]]
    assert lost, f"{name}: {[one.words for one in altered.refusals]}"
    assert not [claim for claim in lost if after[claim] in ("reproduced", "exceeds", "holds-here")]


DOUBTED: dict[str, Callable[[Content], object]] = {
    "a dirty tree": lambda one: one["revision"].update(changes_sha256="f" * 64),
    "no commit": lambda one: one["revision"].update(commit=None),
    "a package beside the lock": lambda one: one["environment"].update(
        lock_differences={"numpy": "1, lock has 2"}
    ),
    "changed files": lambda one: one["environment"].update(changed_files={"torch/x.py": "changed"}),
    "a nightly build": lambda one: library(one, library_of(one).rpartition(".")[0] + ".0.dev20261101"),
    "a source build": lambda one: library(one, f"{library_of(one)}+git123"),
}


def library_of(content: Content) -> str:
    version: str = content["points"][0]["result"]["libraries"]["torch"]
    return version.partition("+")[0]


@pytest.mark.parametrize("name", DOUBTED)
def test_a_doubt_takes_reproduced_away_and_stands_beside_the_verdict(name: str) -> None:
    found = training_record({"nodes=1": 83.0, "nodes=32": 79.5})
    assert finals(found)["throughput-1-node"] == "reproduced"
    content = content_of(found)
    DOUBTED[name](content)
    altered = read(content)
    assert altered.refusals == ()
    assert finals(altered)["throughput-1-node"] == "holds-here"
    assert altered.verdicts[0].doubts == altered.doubts
    assert altered.doubts


def fewer_steps_and_more_warmup(content: Content) -> None:
    content["plan"]["part"]["training"] |= {"steps": 24, "warmup_steps": 7}
    for point in content["points"]:
        del point["result"]["steps"][24:]
        for step in point["result"]["steps"][:7]:
            step["timed"] = False


def did_not_fit(content: Content) -> None:
    for planned, point in zip(content["plan"]["points"], content["points"], strict=True):
        sizes = planned["part"]["microbatches"]
        planned["part"]["microbatches"] = [sizes[0] * 2, *sizes]
        point["attempts"] = [f"microbatch {sizes[0] * 2}"]


def older_schema(content: Content) -> None:
    """Take away what a minor version of the schema has added with a default."""
    del content["evidence"], content["environment"]["changed_files"]
    for point in content["points"]:
        del point["slow"], point["result"]["blocked_seconds"]


def more_nodes(content: Content) -> None:
    """Add a node that has other packages and takes no part."""
    allocation = content["allocation"]
    first = allocation["reports"][allocation["nodes"][0]]
    allocation["nodes"].append("spare")
    allocation["reports"]["spare"] = copy.deepcopy(first) | {"software_sha256": "6" * 64}


def in_a_container(content: Content) -> None:
    content["plan"]["engine"], content["environment"]["image_digest"] = "docker", "sha256:" + "a" * 64


# What an honest record may have otherwise.
HONEST: dict[str, Callable[[Content], object]] = {
    # As ranks mark steps that went on from a checkpoint.
    "resumed": lambda one: [step.update(timed=False, watts=None) for step in steps(one)[14:19]],
    # As a job has that a scheduler started again elsewhere.
    "requeued": lambda one: one.update(json.loads(json.dumps(one).replace('"node-', '"Rack-7.example-'))),
    "another device name": lambda one: device(one, name="Graphics Device"),
    "no architecture from an older rank": lambda one: device(one, arch=None, memory_bytes=None, name="H200"),
    "an older minor schema": older_schema,
    "an older version of the recipe": lambda one: one["plan"].update(recipe_version=1),
    "code that moved": lambda one: one["plan"].update(script="twinrun.train.elsewhere"),
    "another way to start": lambda one: one["plan"].update(launcher="flux", scheduler="lsf", engine="podman"),
    "a container": in_a_container,
    "one node of several": more_nodes,
    "fewer steps and more warm-up": fewer_steps_and_more_warmup,
    "a microbatch that did not fit": did_not_fit,
    "another way of sharding": lambda one: result(one, parallelism="fsdp1"),
    "another driver and kernel": lambda one: [
        report.update(driver="9", kernel="7") for report in one["allocation"]["reports"].values()
    ],
    "no power": lambda one: [step.update(watts=None) for n in range(3) for step in steps(one, n)],
    "another name and a later twinrun": lambda one: one.update(run="my-run", twinrun="9.9"),
    "further libraries": lambda one: [
        point["result"]["libraries"].update(own="1") for point in one["points"]
    ],
    "variables of the site": lambda one: one["environment"].update(variables={"NCCL_DEBUG": "WARN"}),
    "further files": lambda one: one.update(files={"notes.txt": "0" * 64}),
    "slow ranks": lambda one: one["points"][0].update(slow=["rank 3 is slow"]),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_variant_loses_no_verdict(name: str, command: Command, tmp_path: Path) -> None:
    found = training()
    content = content_of(found)
    HONEST[name](content)
    file = tmp_path / "one.json"
    file.write_text(json.dumps(sealed(content)), encoding="utf-8")
    altered = read_record(file, PROJECT)
    assert [one.words for one in altered.refusals] == []
    before, after = finals(found), finals(altered)
    assert after == before
    assert "holds-here" in after.values()
    done = command("report", str(file), "--why", "throughput-1-node")
    assert done.code == 0, done.stderr
    assert "✓ holds here" in done.stdout


def test_a_strangers_formula_layout_and_option_are_taken_as_given() -> None:
    found = bench()
    assert found.refusals == ()
    content = content_of(found)
    for call in content["points"][0]["result"]["calls"]:
        call["work"] = {"formula": "theirs/own", "amounts": {"copy": 1.0}}
        call["labels"] |= {"backend": "native"}
    # An option that the recipe has gained since.
    del content["plan"]["points"][0]["part"]["settings"]["modes"]
    altered = read(content)
    assert altered.refusals == ()
    assert not [one for one in altered.verdicts if "modes" in one.why]


def test_the_word_is_exceeds_above_the_tolerance_and_the_run_ends_well(
    command: Command, tmp_path: Path
) -> None:
    found = training_record({"nodes=1": 110.0, "nodes=32": 105.5})
    verdict = found.verdicts[0]
    assert (verdict.final, round(verdict.factor or 0, 2)) == ("exceeds", 1.33)
    write_record(tmp_path / "one.json", found.record)
    done = command("report", str(tmp_path / "one.json"), "--why", verdict.claim)
    assert done.code == 0
    assert "▲ exceeds" in done.stdout


def test_a_sweep_that_leaves_sizes_out_has_not_answered_a_claim_about_scaling() -> None:
    given: Content = {"gpu": "h200", "scale": "node", "settings": ("model=mpt-7b", "devices=2,8")}
    found = training_record({"devices=2": 500.0, "devices=8": 495.0}, **given)
    (verdict,) = (one for one in found.verdicts if one.claim == "efficiency-1-to-32-nodes")
    assert verdict.final == "not-comparable"
    assert "left out" in verdict.why


def test_a_claim_that_nobody_has_written_says_so() -> None:
    found = training()
    claim = found.recipe.published.claim[0].model_copy(update={"statement": "placeholder: what is said"})
    unwritten = of_recipe(found, claim=(claim,))
    assert unwritten.verdicts[0].final == "not-comparable"
    assert "1 is not written yet" in headline(unwritten)


def test_a_newer_or_older_form_is_refused_and_a_minor_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    content = smoke("rmsnorm")
    for version in ("2", "4.0", f"3.{MINOR + 1}", 2):
        with pytest.raises(InputError, match="unknown version"):
            read_content(sealed(content | {"schema_version": version}), place="record.json")
    monkeypatch.setattr(reading, "MINOR", 4)
    assert read_content(sealed(content | {"schema_version": "3.2"}), place="record.json")


SAME_LOSS = "same-loss-at-every-world-size"


@pytest.mark.parametrize(
    ("claim", "rate", "factor", "why", "confirmed"),
    [
        ("throughput-1-node", 496.0, 1.0, "agrees within both spreads", True),
        ("throughput-1-node", 460.0, 1.0, "and there", False),
        (SAME_LOSS, 490.0, 1.001, "", True),
        (SAME_LOSS, 490.0, 1.05, "the loss at devices=1 is 0.05 apart", False),
    ],
)
def test_a_second_signer_confirms_within_both_spreads_and_of_a_curve_within_the_tolerance(
    claim: str, rate: float, factor: float, why: str, confirmed: bool
) -> None:
    ours, given = training(), {"gpu": "h200", "scale": "node", "settings": ("model=mpt-7b",), "spread": 0.01}
    falls = ours.points[0].one_series("loss")
    assert falls is not None
    curve = [loss * factor for loss in falls.values]
    theirs = training_record({**RATES, "devices=4": rate}, run="another", losses=curve, **given)  # type: ignore[arg-type]
    signed = (dataclasses.replace(one, signer=f"signed by {one.run}") for one in (ours, theirs))
    found = {one.claim: one for one in confirmations(*signed)}[claim]
    assert (why in found.why, found.confirmed) == (True, confirmed)


def test_a_plan_says_which_claims_a_run_of_it_will_answer(command: Command) -> None:
    words = ("run", "recipes/mpt7b-scaling", "--dry", "--json", "--scale", "smoke", "--vendor", "cpu")
    done = command(*words, "--engine", "host")
    claims = {one["claim"]: one for one in done.data["claims"]}
    found = finals(smoke_record("mpt7b-scaling"))
    assert {name for name, one in claims.items() if one["answered"]} == {
        name for name, one in found.items() if one == "holds-here"
    }
    assert "speed says nothing" in claims["throughput-1-node"]["how"]
