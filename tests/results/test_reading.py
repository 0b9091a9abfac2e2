"""A record whose parts contradict each other is refused, with both sides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.records import PROJECT, ROOT, bench_record, training_record
from twinrun.foundation.errors import InputError
from twinrun.planning.plan import Plan
from twinrun.results.reading import read_record
from twinrun.results.record import Record, content_digest, write_record

Change = Callable[[dict[str, Any]], object]
CONVERTED = ROOT / "recipes/mpt7b-scaling/results/h200x4_cuda12.6-torch2.7_2026-11-21-6.json"


def forged(path: Path, content: dict[str, Any], change: Change) -> Path:
    """Write `content` with a change, and a digest that fits it."""
    change(content)
    content["sha256"] = content_digest(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def as_content(record: Record) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(record.model_dump_json())
    return content


def measured(content: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in content["points"][0]["measurements"] if one["id"] == name)
    return found


def times(one: dict[str, Any], factor: float) -> None:
    for field in ("median", "low", "high"):
        one[field] *= factor


def test_a_record_is_read_back(tmp_path: Path) -> None:
    for record in (training_record({"nodes=1": 83.0}), bench_record({"scan-forward-fp16": [2.7, 2.8]})):
        write_record(tmp_path / "record.json", record)
        assert read_record(tmp_path, PROJECT) == record


TRAINING_FORGERIES: dict[str, tuple[Change, str]] = {
    "three times the FLOP/s": (lambda c: times(measured(c, "model-flops"), 3), "model-flops"),
    "a thousandth more": (lambda c: times(measured(c, "model-flops"), 1.001), "model-flops"),
    "three times the MFU": (lambda c: times(measured(c, "model-flops-share"), 3), "model-flops-share"),
    "one end of the spread": (
        lambda c: measured(c, "tokens-per-second").update(high=1e9),
        "tokens-per-second",
    ),
    "another unit": (lambda c: measured(c, "model-flops").update(unit="PFLOP/s"), "unit"),
    "another formula": (lambda c: measured(c, "model-flops").update(formula="6N"), "formula"),
    "another count": (lambda c: measured(c, "tokens-per-second").update(count=2), "count"),
    "a verdict": (lambda c: c["verdicts"][0].update(outcome="not-reproduced"), "throughput-1-node"),
    "another GPU": (lambda c: c["gpu"].update(id="h200"), "GPU"),
    "another peak": (lambda c: c["gpu"].update(peak_bf16_tflops=1000.0), "peak_bf16_tflops"),
    "another precision": (lambda c: c["plan"]["part"]["training"].update(precision="fp32"), "plan's hash"),
    "another batch": (lambda c: c["plan"]["part"]["training"].update(global_batch=3072), "plan's hash"),
    "a derived number less": (
        lambda c: c["points"][0]["measurements"].remove(measured(c, "model-flops-share")),
        "missing",
    ),
    "a number that nothing gives": (
        lambda c: c["points"][0]["measurements"].append({**measured(c, "model-flops"), "id": "speed"}),
        "nothing gives",
    ),
    "a median outside of its samples": (lambda c: measured(c, "step-time").update(median=0.001), "median"),
    "one sample with a spread": (lambda c: measured(c, "step-time").update(count=1, low=0.1), "one sample"),
    "two of one name": (
        lambda c: c["points"][0]["measurements"].append(measured(c, "step-time")),
        "one id",
    ),
    "not finite": (lambda c: measured(c, "step-time").update(median="NaN"), "median"),
    "an unknown version": (lambda c: c.update(schema_version=3), "schema_version"),
    "an older version": (lambda c: c.update(schema_version=1), "schema_version"),
    "no version": (lambda c: c.pop("schema_version"), "schema_version"),
}


@pytest.mark.parametrize("name", TRAINING_FORGERIES)
def test_a_forged_record_is_refused(tmp_path: Path, name: str) -> None:
    change, named = TRAINING_FORGERIES[name]
    content = as_content(training_record({"nodes=1": 83.0, "nodes=32": 79.5}))
    path = forged(tmp_path / "record.json", content, change)
    with pytest.raises(InputError) as error:
        read_record(path, PROJECT)
    assert named in str(error.value)
    assert error.value.found is not None


def first(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["points"][0]
    return found


# Each with a hash of the plan that fits it too.
PLAN_FORGERIES: dict[str, tuple[Change, str]] = {
    "differences left out": (lambda c: c["plan"].update(differences=[]), "not as published"),
    "a fingerprint as published": (
        lambda c: c["plan"]["fingerprint"].update(parameters=6658859008),
        "parameters of the fingerprint",
    ),
    "another precision": (
        lambda c: c["plan"]["part"]["training"].update(precision="fp32"),
        "precision of the fingerprint",
    ),
    "another scale": (lambda c: c["plan"].update(scale="large"), "scale"),
    "another vendor": (lambda c: c["plan"].update(vendor="cpu"), "vendor"),
    "another machine": (lambda c: c["machine"].update(vendor="cpu"), "vendor of the machine"),
    "a point that was not planned": (lambda c: first(c).update(id="nodes=3"), "no such point"),
    "other nodes": (lambda c: first(c).update(nodes=32), "nodes of the plan"),
    "more devices": (lambda c: first(c).update(devices=256), "devices of the plan"),
    "another microbatch": (lambda c: first(c)["facts"].update(microbatch=7), "microbatch"),
    "another model": (lambda c: first(c)["facts"].update(parameters=6658859008), "parameters"),
    "another part of the point": (lambda c: first(c)["part"].update(controls=3), "plan says of the point"),
    "an unknown metric": (
        lambda c: measured(c, "step-time").update(metric="speed"),
        "no such metric",
    ),
    "a unit of another size": (lambda c: measured(c, "step-time").update(unit="ms"), "unit of step-time"),
    "counted per something else": (lambda c: measured(c, "step-time").update(per="link"), "counted per"),
    "a unit of a curve": (lambda c: first(c)["series"][0].update(unit="bits/token"), "unit of loss"),
}


@pytest.mark.parametrize("name", PLAN_FORGERIES)
def test_a_record_is_held_to_what_its_plan_decides(tmp_path: Path, name: str) -> None:
    change, named = PLAN_FORGERIES[name]
    content = as_content(training_record({"nodes=1": 83.0}, settings=("model=mpt-3b",)))
    change(content)
    content["plan_sha256"] = Plan.model_validate_json(json.dumps(content["plan"])).sha256()
    path = forged(tmp_path / "record.json", content, lambda _: None)
    with pytest.raises(InputError) as error:
        read_record(path, PROJECT)
    assert named in str(error.value)
    assert error.value.found is not None


def test_a_benchmark_is_held_to_its_times(tmp_path: Path) -> None:
    content = as_content(
        bench_record({"scan-forward-fp16": [2.7, 2.8], "scan-forward-fp16@mamba_ssm": [5.0, 5.1]})
    )
    name = "scan-forward-fp16/speedup@mamba_ssm"
    path = forged(tmp_path / "record.json", content, lambda c: times(measured(c, name), 2))
    with pytest.raises(InputError, match="speedup"):
        read_record(path, PROJECT)


CONVERTED_FORGERIES: dict[str, Change] = {
    "probed": lambda c: c["machine"]["devices"][0].update(gpu="b200"),
    "model-flops": lambda c: times(measured(c, "model-flops"), 3),
    "model-flops-share": lambda c: times(measured(c, "model-flops-share"), 3),
    "low of model-flops": lambda c: measured(c, "model-flops").update(low=1.0),
}


@pytest.mark.parametrize("named", CONVERTED_FORGERIES)
def test_a_converted_record_is_held_to_its_numbers(tmp_path: Path, named: str) -> None:
    content = json.loads(CONVERTED.read_text(encoding="utf-8"))
    path = forged(tmp_path / "record.json", content, CONVERTED_FORGERIES[named])
    with pytest.raises(InputError, match=f"contradicts itself: .*{named.rsplit(' ', maxsplit=1)[-1]}"):
        read_record(path, PROJECT)


def test_a_verdict_of_earlier_rules_is_given_anew(tmp_path: Path) -> None:
    content = json.loads(CONVERTED.read_text(encoding="utf-8"))
    path = forged(tmp_path / "record.json", content, lambda c: c["verdicts"][0].update(outcome="reproduced"))
    assert read_record(path, PROJECT).verdicts == read_record(CONVERTED, PROJECT).verdicts


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    text = CONVERTED.read_text(encoding="utf-8").replace("NVIDIA H200 SXM", "NVIDIA H300 SXM", 1)
    (tmp_path / "record.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="changed after it was written"):
        read_record(tmp_path, PROJECT)


def test_files_beside_a_record_are_held_to_their_digests(tmp_path: Path) -> None:
    record = training_record({"nodes=1": 83.0}).model_copy(update={"files": {"metrics.jsonl": "0" * 64}})
    write_record(tmp_path / "record.json", record)
    assert read_record(tmp_path, PROJECT).run == record.run
    (tmp_path / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        read_record(tmp_path, PROJECT)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"a": 1}', "not JSON", "[" * 100_000, '{"plan": 1, "points": 2, "sha256": 3}']
)
def test_what_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        read_record(tmp_path / "record.json", PROJECT)
    assert "record" in str(error.value)


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such record"):
        read_record(tmp_path, PROJECT)


def test_changed_claims_judge_anew(tmp_path: Path) -> None:
    record = training_record({"nodes=1": 83.0})
    older = record.model_copy(
        update={
            "claims_sha256": "0" * 64,
            "verdicts": tuple(
                one.model_copy(update={"outcome": "not-reproduced"}) for one in record.verdicts
            ),
        }
    )
    write_record(tmp_path / "record.json", older)
    found = read_record(tmp_path, PROJECT)
    assert found.verdicts == record.verdicts
    assert found.claims_changed.startswith("The run was judged under claims 00000000; changed since, to ")
    assert "came to not-reproduced and comes to" in found.claims_changed
