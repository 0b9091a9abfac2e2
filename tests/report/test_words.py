from __future__ import annotations

from typing import Any

import pytest

from tests.records import training_record
from tests.report.committed import changed, judged, newest, restated, verdict
from twinrun.report.words import (
    headline,
    measured_value,
    published_value,
    shown_conditions,
    tone_of,
)
from twinrun.results.verdicts import Condition, ConditionName

RECORD = newest("mpt7b-scaling")


@pytest.mark.parametrize(
    ("outcomes", "further", "count", "rest", "colour"),
    [
        ("reproduced reproduced", "", "2 of 2 claims", "", "good"),
        ("reproduced not-comparable", "", "1 of 2 claims", ", 1 cannot be asked here", "good"),
        ("reproduced not-reproduced", "", "1 of 2 claims", ", `a-claim` not reproduced", "bad"),
        ("failed reproduced", "", "1 of 2 claims", ", `a-claim` failed", "bad"),
        ("not-comparable", "", "0 of 1 claim", ", 1 cannot be asked here", "neutral"),
        ("config-mismatch", "", "0 of 1 claim", ", 1 is of another configuration", "neutral"),
        ("reproduced", "holds-here", "1 of 2 claims", ", 1 holds here", "good"),
        (
            "reproduced",
            "holds-here fails-here",
            "1 of 3 claims",
            ", 1 holds here, `a-claim` fails here",
            "bad",
        ),
    ],
)
def test_the_headline_counts_what_reproduced_and_what_holds_here(
    outcomes: Any, further: Any, count: str, rest: str, colour: str
) -> None:
    record = judged(RECORD, *outcomes.split())
    elsewhere = (verdict("not-comparable", here=restated(one)) for one in further.split())
    record = changed(record, verdicts=(*record.verdicts, *elsewhere))
    said = f"On 2 x NVIDIA H200 SXM: {count} reproduced as published{rest}."
    assert (headline(record), tone_of(record.verdicts)) == (said, colour)


def test_what_ran_small_says_so() -> None:
    smoke = headline(training_record({"devices=1": 0.1, "devices=2": 0.1}, gpu=None, scale="smoke"))
    place = "2 ranks on a processor with 0.1247 M of 6,659 M parameters"
    assert smoke == f"Smoke run on {place}: 2 checks of the code hold, 3 claims need a GPU."
    whole = headline(training_record({"nodes=1": 83.0}))
    assert whole.startswith("On 8 devices of AMD Instinct MI250, 2 to a card: ")
    alone = headline(judged(RECORD))
    assert alone.endswith("bf16, composer reaches 50.0% (MFU, devices=2). No claim is about one run alone.")


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


def test_what_was_not_judged_says_what_it_needs() -> None:
    names: tuple[ConditionName, ...] = ("hardware", "samples", "samples", "account")
    unmet = [Condition(name=name, met=False, seen="seen") for name in names]
    record = changed(RECORD, verdicts=tuple(verdict("not-comparable", conditions=(one,)) for one in unmet))
    needs = "1 needs the published hardware, 2 are undecided, 1 needs a whole record."
    assert headline(record).endswith(f"0 of 4 claims reproduced as published, {needs}")
    assert shown_conditions(record.verdicts[1]) == [("!", "the samples decide", "seen")]
