from __future__ import annotations

import pytest

from tests.records import node_record, paper_record, smoke_record
from twinrun.record import Outcome, Spread, Verdict
from twinrun.report.words import gib, hardware, headline, number, overall, plain, quantity, within


def verdicts(*outcomes: Outcome) -> list[Verdict]:
    return [
        Verdict(
            claim="one",
            statement="one",
            outcome=outcome,
            reason="",
            published=1.0,
            measured=None,
            unit="ratio",
            per="run",
        )
        for outcome in outcomes
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.95783, "0.9578"),
        (165.83, "165.8"),
        (65_200.4, "65,200"),
        (1.5e-5, "1.5e-05"),
        (-2500, "-2,500"),
    ],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "per", "text"),
    [
        (166, "TFLOP/s", "card", "166 TFLOP/s per card"),
        (0.958, "ratio", "card", "0.958"),
        (2e-5, "nats/token", "run", "2e-05 apart"),
        (None, "TFLOP/s", "card", "-"),
    ],
)
def test_a_quantity_has_its_unit(value: float | None, unit: str, per: str, text: str) -> None:
    assert quantity(value, unit, per) == text


@pytest.mark.parametrize(
    ("value", "text"), [(6658859008, "6,658,859,008"), (True, "True"), (("a", 2), "a or 2")]
)
def test_configuration_values_are_plain(value: int | bool | tuple[str | int | bool, ...], text: str) -> None:
    assert plain(value) == text


def test_memory_is_in_gib() -> None:
    assert gib(3 << 29) == "1.5 GiB"


def test_spread_is_that_of_the_farthest() -> None:
    spread = Spread(median=100.0, low=98.0, high=101.0, count=3, unit="s", per="run")
    assert within(spread) == "±2.0%"
    assert within(spread.scaled(0.0, unit="s", per="run")) == "-"


@pytest.mark.parametrize(
    ("outcomes", "worst", "begins"),
    [
        ((), "open", "No claim"),
        (("reproduced", "reproduced"), "reproduced", "Reproduced. Of 2 claims: 2 reproduced"),
        (("reproduced", "not-comparable"), "reproduced-in-part", "Reproduced as far as"),
        (
            ("reproduced", "not-reproduced"),
            "not-reproduced",
            "Not reproduced. Of 2 claims: 1 not reproduced; 1 repr",
        ),
        (("failed", "not-reproduced"), "failed", "The run failed."),
        (
            ("config-mismatch",),
            "open",
            "Nothing of the publication can be judged from this run. Of 1 claim: 1 not",
        ),
    ],
)
def test_the_headline_is_led_by_what_is_worst(outcomes: tuple[Outcome, ...], worst: str, begins: str) -> None:
    assert overall(verdicts(*outcomes)) == worst
    assert headline(verdicts(*outcomes)).startswith(begins)


def test_hardware_counts_devices_and_says_when_a_card_has_several() -> None:
    assert hardware(node_record()) == "4 x NVIDIA H200 SXM"
    assert hardware(paper_record()) == "256 devices of AMD Instinct MI250, 2 to a card"
    assert hardware(smoke_record()) == "2 ranks on An Example Processor"
    assert hardware(node_record().model_copy(update={"gpu": None})) == "4 x NVIDIA H200 SXM"
