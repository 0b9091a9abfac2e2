"""Claims that two curves are one: control runs say what rounding does, and the claim how much that may be."""

from __future__ import annotations

import pytest

from tests.records import replaced, training_record, warmed
from tests.results.test_judge import PARITY, PUBLISHED, claim_of, one_verdict
from twinrun.protocol.measurements import Series

BOUNDED = {**PARITY, "tolerance": 0.1, "bounds": {"bf16": 0.1}}
CURVE = warmed(4.0, 3.0, 2.5, 2.0)


def with_controls(count: int) -> tuple[Series, ...]:
    """Return a curve of a run and those of its control runs, a thousandth apart."""
    curves = {"loss": CURVE} | {
        f"control-{number}": (*CURVE[:-1], 2.0 * (1.001 + number / 1e4)) for number in range(1, count + 1)
    }
    return tuple(
        Series(id=name, metric="loss", unit="nats/token", per="run", values=values)
        for name, values in curves.items()
    )


@pytest.mark.parametrize(
    ("controls", "last", "outcome", "reason"),
    [
        (8, 2.002, "reproduced", "no farther than 8 control runs"),
        (8, 2.02, "not-reproduced", "grows beyond what rounding does"),
        (7, 2.0, "not-comparable", "8 control runs that differ from the run, there are 7"),
        (0, 2.0, "not-comparable", "there are 0"),
    ],
)
def test_parity_is_held_to_the_envelope_of_control_runs(
    controls: int, last: float, outcome: str, reason: str
) -> None:
    losses = {"nodes=1": CURVE, "nodes=2": (*CURVE[:-1], last)}
    record = training_record({"nodes=1": 83.0, "nodes=2": 82.0}, losses=losses)
    record = replaced(record, "nodes=1", series=with_controls(controls))
    for between in (None, ("nodes=1", "nodes=2")):
        found = one_verdict(record, claim_of(between=between, **BOUNDED))
        assert (found.final, reason in found.why) == (outcome, True), found.why


@pytest.mark.parametrize(
    ("bounds", "last", "outcome", "reason"),
    [
        # The control runs are up to 0.0018 apart, and their envelope reaches 0.0034.
        ({"bf16": 0.1}, 2.004, "reproduced", "envelope 0.0034"),
        ({"bf16": 0.0019}, 2.004, "not-reproduced", "envelope 0.0019"),
        ({"bf16": 0.001}, 2.0, "not-comparable", "a control run is 0.0018 apart, over the bound of 0.001"),
        ({"fp32": 0.1}, 2.0, "not-comparable", "the claim has no bound in bf16"),
    ],
)
def test_control_runs_never_widen_the_bound_of_the_claim(
    bounds: dict[str, float], last: float, outcome: str, reason: str
) -> None:
    losses = {"nodes=1": CURVE, "nodes=2": (*CURVE[:-1], last)}
    record = training_record({"nodes=1": 83.0, "nodes=2": 82.0}, losses=losses)
    record = replaced(record, "nodes=1", series=with_controls(8))
    found = one_verdict(record, claim_of(**(BOUNDED | {"bounds": bounds})))
    assert (found.final, reason in found.why) == (outcome, True), found.why


# Of these the publication says nothing, and recipe.toml says the paper's.
SILENT = ("activation_checkpointing", "data", "model", "steps", "warmup_steps")


def test_parity_as_published_is_of_the_published_hardware_and_restated_elsewhere() -> None:
    losses = {"devices=1": CURVE, "devices=2": CURVE}
    rates, settings = {"devices=1": 500.0, "devices=2": 490.0}, ("devices=1,2",)
    record = training_record(rates, gpu="h200", scale="node", settings=settings, losses=losses)
    record = replaced(record, "devices=1", series=with_controls(8))
    here = {
        "statement": "one curve here",
        "metric": "envelope-share",
        "value": 1.0,
        "derivation": "1 / 1",
        "basis": "an envelope",
        "tolerance": 0.001,
        "because": "the envelope is the tolerance",
        "free": [*PUBLISHED.fingerprint, *SILENT],
        "fails_when": {"what": "twice as far", "value": 2.0, "derivation": "2"},
    }
    hardware = {"gpu": "mi250", "cards": 4, "nodes": 1, "software": "x"}
    claim = claim_of(hardware=hardware, here=here, why_none=None, **BOUNDED)
    found = one_verdict(record, claim)
    assert (found.outcome, found.final) == ("not-comparable", "holds-here")
    assert "of the envelope" in found.why
