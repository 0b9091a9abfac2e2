"""Which hardware to choose: the three marks, what stands first, and prices that are none."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.records import training_record
from tests.report.committed import PROJECT
from twinrun.foundation.errors import InputError
from twinrun.report.hardware import (
    HardwareChoice,
    ModelChoices,
    choices,
    fastest,
    mark_of,
    per_device,
    picture_of,
    prices_of,
    table_of,
    write_hardware_page,
)


@cache
def found() -> tuple[ModelChoices, ...]:
    own = training_record({"devices=2": 500.0}, gpu="h100-80gb", scale="node", settings=("model=mpt-7b",))
    return tuple(choices(PROJECT, [own]))


def choice(gpu: str) -> HardwareChoice:
    (one,) = (one for one in found() if one.name == "mpt-7b")
    (row,) = (row for row in one.choices if row.gpu.id == gpu and row.precision == "bf16")
    return row


def test_a_published_and_a_measured_number_stand_beside_the_predicted() -> None:
    h100, alone = choice("h100-80gb"), choice("mi300x")
    assert {mark_of(one) for one in h100.known} == {"published", "measured"}
    assert h100.best
    assert h100.best.value == max(map(per_device, h100.known))
    assert h100.predicted
    assert h100.predicted.interval
    assert alone.predicted
    assert alone.best == alone.numbers["predicted"]


def test_a_card_of_two_dies_is_two_devices() -> None:
    """166 TFLOP/s of an MI250, by 6N+12LDS and sequences of 2048, are two dies."""
    (published,) = {per_device(one) for one in choice("mi250").known if one.cards == 4}
    (model,) = (one for one in found() if one.name == "mpt-7b")
    assert published * 2 * model.shape.flops_per_token() / 1e12 == pytest.approx(166, abs=0.5)


def test_every_model_has_a_table_and_a_picture_of_all_gpus_in_the_order_of_their_numbers() -> None:
    for one in found():
        table = table_of(one, {"h200": 3.0})
        assert {row[0].text for row in table.rows} == {gpu.name for gpu in PROJECT.gpus.values()}
        priced = {row[0].text for row in table.rows if row[-1].text != "-"}
        assert priced <= {PROJECT.gpus["h200"].name}
        assert all(row.marks for row in picture_of(one).rows)
        speeds = [row.best.value if row.best else 0.0 for row in one.choices]
        assert speeds == sorted(speeds, reverse=True)
        first = max(map(per_device, one.choices[0].known), default=speeds[0])
        assert f"{first:,.0f} tokens/s" in fastest(one)


def test_the_page_is_one_file_of_a_model(tmp_path: Path) -> None:
    page = tmp_path / "hardware.html"
    write_hardware_page(page, [one for one in found() if one.name == "mpt-7b"], {"h200": 3.0})
    text = page.read_text(encoding="utf-8")
    assert [word in text for word in ("price of 1B tokens", "mpt-7b", "mpt-1b")] == [True, True, False]


@pytest.mark.parametrize("words", ["h200=0", "h200=-1", "h200=x", "h200", "h200=inf", "nothing=2"])
def test_a_price_that_is_none_is_refused(words: str) -> None:
    with pytest.raises(InputError, match=r"price|GPU"):
        prices_of(words, PROJECT.gpus)
