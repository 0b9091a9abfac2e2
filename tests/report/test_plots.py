from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import (
    PAPER_RATES,
    gpus,
    loaded_recipe,
    loss_curve,
    node_record,
    paper_record,
    smoke_record,
    with_losses,
    with_point,
)
from twinrun.record import Record
from twinrun.report.losses import curves, distances
from twinrun.report.plots import label_heights, scaling
from twinrun.report.series import Chart, Spot, efficiency, throughput
from twinrun.report.svg import COLOURS, SIGNS, Picture


def throughput_of(*records: Record) -> Chart:
    return throughput(records, loaded_recipe().published, gpus())


def efficiency_of(*records: Record) -> Chart:
    return efficiency(records, loaded_recipe().published, gpus())


def labels(chart: Chart) -> list[str]:
    return [one.label for one in chart.series]


def drawn(chart: Chart) -> Picture:
    return scaling(chart, name="picture", title="Title")


def test_a_card_and_its_devices_have_the_same_mfu() -> None:
    chart = throughput_of(paper_record())
    ours, theirs = chart.series[0], chart.series[1]
    assert [spot.devices for spot in theirs.spots] == [8, 256]
    assert theirs.spots[0].value == pytest.approx(166 / 362)
    assert theirs.spots[1].value == pytest.approx(159 / 362)
    assert ours.spots[0].value == pytest.approx(theirs.spots[0].value, rel=0.01)
    assert ours.spots[0].low < ours.spots[0].value < ours.spots[0].high


def test_the_axis_names_the_formula() -> None:
    assert throughput_of(paper_record()).quantity == "MFU (model-flops/6N+12LDS)"


def test_references_are_of_the_model_that_ran() -> None:
    assert labels(throughput_of(paper_record()))[2:] == [
        "published elsewhere: 8 x H100-80GB",
        "published elsewhere: 8 x A100-80GB",
    ]
    small = throughput_of(node_record()).series[-1]
    assert small.spots[0].value == pytest.approx(413 / 989.5)
    assert "413 TFLOP/s per card" in small.detail


def test_another_model_is_said_to_be_another() -> None:
    assert any("6,658,859,008" in note for note in throughput_of(node_record()).notes)
    assert not any("parameters" in note for note in throughput_of(paper_record()).notes)


def test_without_mfu_tokens_are_drawn_and_nothing_published() -> None:
    chart = throughput_of(smoke_record())
    assert (chart.quantity, chart.scale) == ("tokens/s per device", "count")
    assert [one.kind for one in chart.series] == ["measured"]
    assert chart.series[0].spots[0].value == pytest.approx(5200)
    assert "nothing published can be drawn" in chart.notes[0]


def test_a_record_without_mfu_is_named_beside_others() -> None:
    chart = throughput_of(node_record(), smoke_record())
    assert any("Not drawn, for want of an MFU by this formula: 2 ranks on" in note for note in chart.notes)


def test_efficiency_is_relative_to_the_smallest_point() -> None:
    ours, theirs = efficiency_of(node_record()).series
    assert ours.spots[0].value == 1
    assert ours.spots[-1].value == pytest.approx(62_000 / 65_200)
    assert theirs.spots[-1].value == pytest.approx(159 / 166)


def test_efficiency_needs_two_points_on_devices() -> None:
    assert efficiency_of(node_record(rates={1: 65_000.0})).series == ()
    assert efficiency_of(smoke_record()).series == ()


def test_a_record_looks_the_same_in_both_pictures() -> None:
    records = (smoke_record(), node_record(), paper_record())
    first, second = (drawn(chart) for chart in (throughput_of(*records), efficiency_of(*records)))
    looks = [{key.label: (key.sign, key.colour) for key in picture.keys} for picture in (first, second)]
    shared = looks[0].keys() & looks[1].keys()
    assert len(shared) == 3
    assert all(looks[0][label] == looks[1][label] for label in shared)


@pytest.mark.parametrize(
    "chart",
    [
        throughput_of(paper_record()),
        throughput_of(node_record(rates={1: 65_000.0})),
        throughput_of(smoke_record()),
        throughput_of(*[node_record()] * 9),
        efficiency_of(paper_record()),
        efficiency_of(node_record(rates={1: 1000.0, 2: 2400.0})),
    ],
)
def test_pictures_are_svg_with_title_and_description(chart: Chart) -> None:
    picture = drawn(chart)
    root = ET.fromstring(picture.svg)
    texts = [child.text for child in root[:2]]
    assert texts[0] == "Title"
    assert chart.quantity in str(texts[1])
    assert root.attrib["role"] == "img"
    assert len(picture.keys) == len(chart.series)
    assert all(stand_in not in picture.svg for stand_in in COLOURS.values())


def test_the_same_chart_gives_the_same_bytes() -> None:
    assert drawn(throughput_of(paper_record())).svg == drawn(throughput_of(paper_record())).svg


def test_pictures_take_their_colours_from_the_page() -> None:
    svg = drawn(throughput_of(paper_record())).svg
    for name in ("ink", "grid", "published", "reference", "series-1"):
        assert f"var(--{name})" in svg


def test_names_with_dollars_and_angles_are_text() -> None:
    named = with_point(smoke_record(), 0, id="$\\frac{1}{$ <script>")
    assert "<script>" not in curves(named, name="loss", title="<script>$").svg


def test_loss_curves_name_the_largest_difference() -> None:
    run = with_losses(smoke_record(), loss_curve(40), loss_curve(40, shift=0.01))
    picture = curves(run, name="loss", title="Loss")
    assert "at step 40" in picture.notes[0]
    assert [key.label for key in picture.keys] == ["devices=1", "devices=2"]


@pytest.mark.parametrize(
    ("run", "note"),
    [
        (smoke_record(rates={1: 5000.0}), "no second curve"),
        (with_point(smoke_record(), 0, order_hash="c" * 64), "need not coincide"),
        (with_losses(smoke_record(), loss_curve(40), loss_curve(39)), "ends"),
        (with_losses(smoke_record(), loss_curve(40), loss_curve(40)), "the losses are equal"),
    ],
)
def test_loss_curves_say_what_can_be_read_from_them(run: Record, note: str) -> None:
    assert note in curves(run, name="loss", title="Loss").notes[0]


def test_distances_are_drawn_only_where_curves_should_coincide_and_do_not() -> None:
    def picture(run: Record) -> Picture | None:
        return distances(run, tolerance=0.01, name="distance", title="Distance")

    assert picture(smoke_record()) is not None
    assert picture(with_losses(smoke_record(), loss_curve(40), loss_curve(40))) is None
    assert picture(with_losses(smoke_record(), (), ())) is None
    assert picture(with_point(smoke_record(), 0, order_hash="c" * 64)) is None


def test_a_short_logarithmic_axis_has_plain_labels() -> None:
    apart = [2.0 * (1 + 0.001 * step) for step in range(2, 7)]
    run = with_losses(smoke_record(), (2.0,) * len(apart), tuple(apart))
    drawn = distances(run, tolerance=0.004, name="distance", title="Distance")
    assert drawn is not None
    assert "mathdefault" not in drawn.svg
    assert ">0.005<" in drawn.svg


def spots(values: Sequence[float]) -> list[Spot]:
    return [Spot(devices=1, value=value, low=value, high=value) for value in sorted(values)]


@given(values=st.lists(st.floats(min_value=0, max_value=1), min_size=1, max_size=8), above=st.booleans())
def test_labels_of_a_column_do_not_touch(values: list[float], above: bool) -> None:
    heights = label_heights(spots(values), 0.05, above=above)
    assert all(later - earlier >= 0.05 - 1e-9 for earlier, later in pairwise(heights))


def test_a_lone_label_stands_on_its_side() -> None:
    assert label_heights(spots([0.5]), 0.1, above=True) == [pytest.approx(0.6)]
    assert label_heights(spots([0.5]), 0.1, above=False) == [pytest.approx(0.4)]


def test_every_mark_has_a_sign() -> None:
    picture = drawn(throughput_of(*[paper_record(rates={1: PAPER_RATES[1]})] * 5))
    assert {key.sign for key in picture.keys} <= set(SIGNS.values())
