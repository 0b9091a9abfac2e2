from __future__ import annotations

import pytest

from tests.report.committed import PROJECT, as_published, judged, newest, verdict
from twinrun.report.words import (
    claimed_value,
    heading,
    headline,
    measured_value,
    outcome,
    published_value,
    tone,
)
from twinrun.results.record import Outcome

RECORD = newest("mpt7b-scaling")


@pytest.mark.parametrize(
    ("outcomes", "sentence", "colour"),
    [
        ((), "No claim was judged.", "neutral"),
        (("reproduced", "reproduced"), "Reproduced: 2 of 2 claims.", "good"),
        (("reproduced", "not-comparable"), "Reproduced: 1 of 2 claims; 1 not comparable.", "good"),
        (("reproduced", "not-reproduced"), "Not reproduced: 1 of 2 claims; 1 reproduced.", "bad"),
        (("failed", "reproduced"), "Failed: 1 of 2 claims; 1 reproduced.", "bad"),
        (("not-comparable",), "Not comparable: 1 of 1 claim.", "neutral"),
        (("config-mismatch",), "Config mismatch: 1 of 1 claim.", "neutral"),
    ],
)
def test_the_headline_is_led_by_what_decides(
    outcomes: tuple[Outcome, ...], sentence: str, colour: str
) -> None:
    record = judged(as_published(RECORD), *outcomes)
    assert (headline(record), tone(record)) == (sentence, colour)


def test_another_experiment_is_no_reproduction() -> None:
    record = judged(RECORD, "reproduced", "not-comparable", "not-comparable")
    assert headline(record) == (
        "Not the published experiment (parameters 1,315,950,592, published 6,658,859,008;"
        " 2 more fields differ): 1 of 3 claims reproduced, 2 not comparable."
    )
    assert tone(record) == "neutral"


def test_another_experiment_can_refute_what_holds_anywhere() -> None:
    assert tone(judged(RECORD, "not-reproduced", "reproduced")) == "bad"


@pytest.mark.parametrize(
    ("published", "measured", "unit", "per", "texts"),
    [
        (166, 165.83, "TFLOP/s", "card", ("166 TFLOP/s per card", "165.8 TFLOP/s per card")),
        (0.958, 0.9512, "ratio", "card", ("0.958", "0.951")),
        (0, 2e-5, "nats/token", "run", ("equal", "2e-05 apart")),
        (0, 0.0, "nats/token", "run", ("equal", "equal")),
        (2.5, None, "s", "run", ("2.5 s", "-")),
    ],
)
def test_a_value_has_its_unit(
    published: float, measured: float | None, unit: str, per: str, texts: tuple[str, str]
) -> None:
    found = verdict("reproduced", published=published, measured=measured, unit=unit, per=per)
    assert (published_value(found), measured_value(found)) == texts


def test_a_claim_and_its_verdict_say_the_same() -> None:
    claims = PROJECT.recipe("mpt7b-scaling").published.claim
    assert [claimed_value(one) for one in claims] == [published_value(one) for one in RECORD.verdicts]


def test_an_outcome_has_a_sign() -> None:
    assert outcome(verdict("not-reproduced")) == "✗ not reproduced"


def test_a_heading_is_one_line() -> None:
    assert heading("micro-\nbatch\nof a device") == "microbatch of a device"
