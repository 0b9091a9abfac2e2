"""Claims: what a publication says is refused when it is loaded, where no run could answer it."""

from __future__ import annotations

import copy
import functools
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.records import BENCH, PROJECT, ROOT, TRAINING
from twinrun.foundation.errors import InputError
from twinrun.manifests.published import published_of
from twinrun.workloads import load_workload

ABSOLUTE, RATIO, INVARIANT = "throughput-1-node", "efficiency-1-to-32-nodes", "same-loss-at-every-world-size"
SCAN, OCTOBER, OF_TWO = "scan-forward-mi250", "october-of-a100-40gb", "conv-forward-mi250-of-a40"


@functools.cache
def _parsed(recipe: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "recipes" / recipe / "published.toml").read_text(encoding="utf-8"))


def content(recipe: str) -> dict[str, Any]:
    return copy.deepcopy(_parsed(recipe))


def load(claim: str, changes: dict[str, Any]) -> None:
    """Load the recipe of a claim with the claim changed, within tables too; None leaves a key out."""
    for recipe in (TRAINING, BENCH, "mpt-throughput"):
        table = content(recipe)
        for one in (*table["claim"], *table.get("between_records", ())):
            if one["id"] == claim:
                change(one, changes)
                check(recipe, table)
                return
    raise KeyError(claim)


def change(table: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and key in table:
            change(table[key], value)
        else:
            table[key] = value
        if table[key] is None:
            del table[key]


def check(recipe: str, table: dict[str, Any]) -> None:
    """Hold what published.toml says against the recipe."""
    published = published_of(table, place="published.toml")
    loaded = PROJECT.recipe(recipe).model_copy(update={"published": published})
    load_workload(loaded.workload).check(loaded, list(PROJECT.demands(published, Path("published.toml"))))


TIME = {"metric": "time", "unit": "ms", "per": "run", "formula": None, "better": "lower"}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (ABSOLUTE, {"point": None}, "also needs: point"),
    (ABSOLUTE, {"hardware": None, "point": None}, "also needs: point, hardware"),
    (RATIO, {"between": None}, "also needs: between"),
    (RATIO, {"between": ["nodes=1", "nodes=1"]}, "one point twice"),
    (ABSOLUTE, {"formula": None}, "claim.0.formula"),
    (ABSOLUTE, {"formula": "6N"}, "claim.0.formula"),
    (ABSOLUTE, {"formula": "bus-bandwidth/all-reduce"}, "claim.0.formula"),
    (ABSOLUTE, {"metric": "model-flop"}, "did you mean `model-flops`"),
    (ABSOLUTE, {"metric": "tokens-per-second"}, "claim.0.formula"),
    (ABSOLUTE, {"metric": "tokens-per-second", "formula": None}, "claim.0.unit"),
    (ABSOLUTE, {"unit": "tokens/s"}, "claim.0.unit"),
    (ABSOLUTE, {"unit": "ratio"}, "claim.0.unit"),
    (RATIO, {"unit": "TFLOP/s"}, "claim.2.unit"),
    (ABSOLUTE, {"per": "link"}, "claim.0.per"),
    (ABSOLUTE, {"per": "rack"}, "claim.0.per"),
    (ABSOLUTE, {"better": "lower"}, "claim.0.better"),
    (ABSOLUTE, {"better": "equal"}, "`better` is `equal`"),
    (INVARIANT, {"better": "lower"}, "`better` is `equal`"),
    (INVARIANT, {"value": 0.1}, "expected distance"),
    (ABSOLUTE, {"value": 0.0}, "must be positive"),
    (ABSOLUTE, {"value": -166.0}, "must be positive"),
    (ABSOLUTE, {"tolerance": 0.0}, "claim.0.tolerance"),
    (ABSOLUTE, {"tolerance": 1.5}, "claim.0.tolerance"),
    (ABSOLUTE, {"point": "nodes=3"}, "no scale has a point nodes=3"),
    (ABSOLUTE, {"point": "2x4096"}, "no scale has a point"),
    (RATIO, {"between": ["nodes=32", "nodes=5"]}, "claim.2.between"),
    (ABSOLUTE, {"measurement": "scan-forward"}, "claim.0.point"),
    (ABSOLUTE, TIME, "measures"),
    (ABSOLUTE, {"kind": "guess"}, "claim.0.kind"),
    (ABSOLUTE, {"id": RATIO}, "same id"),
    (ABSOLUTE, {"here": None}, "either a table `here` or a reason `why_none`"),
    (ABSOLUTE, {"why_none": "none"}, "either a table `here` or a reason `why_none`"),
    (RATIO, {"tolerance": 0.05}, "not smaller than the effect"),
    (ABSOLUTE, {"valu": 1.0}, "unknown key"),
    (ABSOLUTE, {"hardware": {"gpu": "mi250y"}}, "claim.0.hardware.gpu"),
    (SCAN, {"measurement": None}, "`measurement` is needed"),
    (SCAN, {"measurement": "scan-forwards-fp16"}, "no measurement scan-forwards-fp16"),
    (SCAN, {"measurement": "scan-forward-fp64"}, "no measurement"),
    (SCAN, {"measurement": "scan-forward-fp16@flash"}, "no measurement"),
    (SCAN, {"point": "2x70"}, "no scale has a point 2x70"),
    (SCAN, {"metric": "loss", "unit": "nats/token", "per": "run"}, "a benchmark measures no loss"),
    (OF_TWO, {"measurement": "conv-sideways-fp16"}, "no measurement conv-sideways-fp16"),
    (OCTOBER, {"why_none": "none"}, "either a table `here` or a reason `why_none`"),
    ("october-over-june", {"why_none": None}, "either a table `here` or a reason `why_none`"),
    (OCTOBER, {"under": {"gpu": "mi300x", "stack": "any"}}, "both sides of rocm"),
]
FAILING: dict[str, Any] = {"what": "made up", "value": 0.4, "derivation": "40 / 100"}
RESTATED: list[tuple[str, dict[str, Any], str]] = [
    (ABSOLUTE, {"metric": "model-flops-shar"}, "claim.0.here.metric"),
    (ABSOLUTE, {"metric": "roofline-share"}, "claim.0.here.metric"),
    (ABSOLUTE, {"unit": "TFLOP/s"}, "claim.0.here.unit"),
    (ABSOLUTE, {"better": "lower"}, "claim.0.here.better"),
    (ABSOLUTE, {"formula": "6N"}, "claim.0.here.formula"),
    (ABSOLUTE, {"free": ["parameter"]}, "did you mean `parameters`"),
    (ABSOLUTE, {"free": ["parameters", "microbatch"]}, "claim.0.here.free"),
    (ABSOLUTE, {"free": ["precision"]}, "model-flops-share depends on this field"),
    (ABSOLUTE, {"metric": "tokens-per-second"}, "tokens-per-second depends on this field"),
    (ABSOLUTE, {"metric": "kept-per-doubling"}, "for a claim of kind ratio alone"),
    (ABSOLUTE, {"value": 0.45}, "weaker than the published statement"),
    (ABSOLUTE, {"tolerance": 0.03}, "weaker than the published statement"),
    (ABSOLUTE, {"value": 0.5}, "not the derivation's"),
    (ABSOLUTE, {"derivation": "166 / 0"}, "claim.0.here.derivation"),
    (ABSOLUTE, {"derivation": "9 ** 9 ** 9"}, "claim.0.here.derivation"),
    (ABSOLUTE, {"derivation": "__import__('os')"}, "claim.0.here.derivation"),
    (ABSOLUTE, {"derivation": "(" * 150}, "claim.0.here.derivation"),
    (ABSOLUTE, {"derivation": None}, "claim.0.here.derivation"),
    (ABSOLUTE, {"because": None}, "claim.0.here.because"),
    (ABSOLUTE, {"least_devices": 0}, "claim.0.here.least_devices"),
    (ABSOLUTE, {"freed": []}, "unknown key"),
    (ABSOLUTE, {"fails_when": None}, "claim.0.here.fails_when: this key is required"),
    (ABSOLUTE, {"fails_when": FAILING | {"value": 0.46}}, "claim.0.here.fails_when.value: the value is not"),
    (ABSOLUTE, {"fails_when": FAILING | {"derivation": "166 / a"}}, "claim.0.here.fails_when.derivation"),
    (ABSOLUTE, {"fails_when": FAILING | {"value": 0.4558, "derivation": "165 / 362"}}, "passes what should"),
    (RATIO, {"tolerance": 0.009}, "not smaller than the effect"),
    (OCTOBER, {"value": 0.6}, "weaker than the published statement"),
    (OCTOBER, {"tolerance": 0.2}, "weaker than the published statement"),
    (OCTOBER, {"metric": "kept-per-doubling"}, "for a claim of kind ratio alone"),
    (OCTOBER, {"free": ["precision"]}, "depends on this field"),
    (OCTOBER, {"fails_when": FAILING | {"value": 0.9, "derivation": "0.9"}}, "passes"),
]
REFUSED += [(claim, {"here": changes}, expected) for claim, changes, expected in RESTATED]


@pytest.mark.parametrize(("claim", "changes", "expected"), REFUSED)
def test_a_claim_or_a_restatement_that_nothing_could_answer_is_refused(
    claim: str, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError) as caught:
        load(claim, changes)
    assert expected in str(caught.value)
    assert "published.toml" in str(caught.value)


BYTES = {"metric": "bandwidth", "unit": "TB/s", "value": 0.9, "better": "higher"}
TIMES = {"unit": "ratio", "better": "higher"}


@pytest.mark.parametrize(
    ("claim", "changes"),
    [
        (ABSOLUTE, {"here": {"value": 0.45, "weaker": "half a percent is left for noise"}}),
        (SCAN, {"measurement": "scan-forward-bf16-accumulated@mamba_ssm"}),
        (SCAN, {"measurement": "scan-forward-fp16/bandwidth"} | BYTES),
        (SCAN, {"measurement": "scan-forward-bf16/memory-saving@torch", "metric": "memory-saving"} | TIMES),
        (SCAN, {"measurement": "conv-backward-bf16/speedup@causal_conv1d", "metric": "speedup"} | TIMES),
    ],
)
def test_a_weaker_restatement_that_says_so_and_any_measurement_of_a_case_are_claimable(
    claim: str, changes: dict[str, Any]
) -> None:
    load(claim, changes)


FAMILY: dict[str, Any] = {
    "columns": ["nodes", "value", "share"],
    "rows": [[1, 166, 0.4586], [32, 159, 0.4392, {"here": {"least_devices": 2}}]],
    "each": {
        "id": "throughput-{nodes}",
        "statement": "MPT-7B trains at {value:.1f} TFLOP/s, {share:percent} of the peak, on {nodes} nodes",
        "value": "{value}",
        "point": "nodes={nodes}",
    },
}


def family(**changes: Any) -> dict[str, Any]:
    """Return the content of the recipe with its first claim as a family of two, changed."""
    table = content(TRAINING)
    first = {key: value for key, value in table["claim"][0].items() if key not in FAMILY["each"]}
    each = first | FAMILY["each"]
    here = {key: value for key, value in first["here"].items() if key != "value"}
    each |= {"here": here | {"derivation": "{value} / 362"}}
    table["claim"] = [FAMILY | {"each": each} | changes, *table["claim"][2:]]
    return table


def test_a_family_gives_a_claim_for_each_row() -> None:
    one, two, *others = published_of(family(), place="published.toml").claim
    assert [one.id, two.id, two.point, two.value] == ["throughput-1", "throughput-32", "nodes=32", 159]
    assert one.statement == "MPT-7B trains at 166.0 TFLOP/s, 45.86 % of the peak, on 1 nodes"
    assert one.here
    assert two.here
    assert (one.here.value, two.here.value, two.here.least_devices) == (0.4586, 0.4392, 2)
    assert others[0].id == RATIO


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"columns": ["nodes", "value"]}, "claim.0: columns and template differ"),
        ({"columns": ["nodes", "value", "share", "rate"]}, "found: rate"),
        ({"each": {"id": "a}"}}, "claim.0.each: not a template"),
        ({"rows": [[1, 166]]}, "claim.0.rows.0: not a row of this family"),
        ({"rows": [[1, 166, 0.4586, "more"]]}, "not a row of this family"),
        ({"rows": [[1, "many", 0.4586]]}, "not a row of this family"),
        ({"row": []}, "claim.0:row: unknown key"),
        ({"rows": [[1, 0.0, 0.4586]]}, "must be positive"),
    ],
)
def test_a_family_that_gives_no_claim_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        published_of(family(**changes), place="published.toml")
    assert expected in str(caught.value)
