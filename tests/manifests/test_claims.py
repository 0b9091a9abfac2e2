"""Claims: what a publication says is refused when it is loaded, where no run could answer it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.records import BENCH, PROJECT, ROOT, TRAINING
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import validate
from twinrun.manifests.claims import Published
from twinrun.planning.project import Project

ABSOLUTE, RATIO, INVARIANT = "throughput-1-node", "efficiency-1-to-32-nodes", "same-loss-at-every-world-size"


def content(recipe: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "recipes" / recipe / "published.toml").read_text(encoding="utf-8"))


def load(recipe: str, claim: str, changes: dict[str, Any]) -> None:
    """Load the recipe with a changed claim; None leaves a key out."""
    table = content(recipe)
    place = next(number for number, one in enumerate(table["claim"]) if one["id"] == claim)
    changed = table["claim"][place] | changes
    table["claim"][place] = {key: value for key, value in changed.items() if value is not None}
    published = validate(table, Published, place="published.toml")
    loaded = PROJECT.recipe(recipe).model_copy(update={"published": published})
    Project(ROOT)._check_claims(loaded, Path("published.toml"))


@pytest.mark.parametrize("claim", [ABSOLUTE, RATIO, INVARIANT])
def test_the_claims_of_the_recipe_are_read_back(claim: str) -> None:
    load(TRAINING, claim, {})


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
    (
        ABSOLUTE,
        {"metric": "time", "unit": "ms", "per": "run", "formula": None, "better": "lower"},
        "measures",
    ),
    (ABSOLUTE, {"controls": ["nodes=2"]}, "go with a parity"),
    (ABSOLUTE, {"kind": "guess"}, "claim.0.kind"),
    (ABSOLUTE, {"id": RATIO}, "same id"),
    (ABSOLUTE, {"valu": 1.0}, "unknown key"),
]


@pytest.mark.parametrize(("claim", "changes", "told"), REFUSED)
def test_a_claim_that_nothing_could_answer_is_refused(claim: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        load(TRAINING, claim, changes)
    assert told in str(caught.value)


def test_an_unknown_gpu_is_refused() -> None:
    hardware = content(TRAINING)["claim"][0]["hardware"] | {"gpu": "mi250y"}
    with pytest.raises(InputError, match=r"claim\.0\.hardware\.gpu") as caught:
        load(TRAINING, ABSOLUTE, {"hardware": hardware})
    assert caught.value.hint == "did you mean `mi250x`?" or "mi250" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"measurement": None}, "`measurement` is needed"),
        ({"measurement": "scan-forwards-fp16"}, "no measurement scan-forwards-fp16"),
        ({"measurement": "scan-forward-fp64"}, "no measurement"),
        ({"measurement": "scan-forward-fp16@flash"}, "no measurement"),
        ({"point": "2x70"}, "no scale has a point 2x70"),
        ({"metric": "loss", "unit": "nats/token", "per": "run"}, "a benchmark measures no loss"),
    ],
)
def test_a_call_that_the_labels_do_not_give_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        load(BENCH, "scan-forward-mi250", changes)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"measurement": "scan-forward-bf16-accumulated@mamba_ssm"},
        {
            "measurement": "scan-forward-fp16/bandwidth",
            "metric": "bandwidth",
            "unit": "TB/s",
            "better": "higher",
        },
        {
            "measurement": "conv-backward-bf16/speedup@causal_conv1d",
            "metric": "speedup",
            "unit": "ratio",
            "better": "higher",
        },
    ],
)
def test_any_measurement_that_a_case_can_give_is_claimable(changes: dict[str, Any]) -> None:
    load(BENCH, "scan-forward-mi250", changes)


NAMES = st.text(alphabet="abc-/@=0123456789 ", max_size=12)
WRONG: dict[str, st.SearchStrategy[Any]] = {
    "unit": NAMES | st.sampled_from(["ms", "ratio", "GB/s", "nats/token", ""]),
    "per": NAMES | st.sampled_from(["link", "cards", "gpu"]),
    "better": NAMES | st.sampled_from(["lower", "equal", "up"]),
    "metric": NAMES | st.sampled_from(["loss", "time", "bandwidth", "speedup", "checks-passed"]),
    "point": NAMES | st.sampled_from(["nodes=3", "devices=3", "nodes=0", "2x4096x5376x16"]),
    "formula": NAMES | st.sampled_from(["6N", "bus-bandwidth/all-reduce"]),
    "measurement": NAMES | st.sampled_from(["loss", "scan-forward-fp16"]),
    "value": st.sampled_from([0.0, -1.0, "166", None, [166.0]]),
}


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_generated_claims_with_something_wrong_are_refused(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(list(WRONG)))
    value = data.draw(WRONG[key])
    with pytest.raises(InputError) as caught:
        load(TRAINING, ABSOLUTE, {key: value})
    assert "published.toml" in str(caught.value)


def test_two_claims_of_one_name_are_refused() -> None:
    table = content(TRAINING)
    table["claim"].append(table["claim"][0])
    with pytest.raises(InputError, match="two claims have the same id"):
        validate(table, Published, place="published.toml")
