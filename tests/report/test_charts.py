from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinrun.report import charts
from twinrun.report.charts import ChartLabel, draw, draw_beside, look_of, write_labels
from twinrun.report.picture import COLOURS, SIGNS, canvas
from twinrun.workloads.tables_and_charts import (
    Bar,
    BarChart,
    Chart,
    Curve,
    CurveKind,
    LineChart,
    RooflineChart,
    RooflineSpot,
    Spot,
)

KINDS: tuple[CurveKind, ...] = ("measured", "published", "reference", "baseline", "bound")


def curve(
    label: str, *values: float, kind: CurveKind = "measured", place: int = 0, spread: float = 0.0
) -> Curve:
    spots = (
        Spot.model_construct(x=2.0**power, value=one, low=one * (1 - spread), high=one * (1 + spread))
        for power, one in enumerate(values)
    )
    # As workloads do where a curve has gaps: not a number is no field of a record.
    return Curve.model_construct(label=label, kind=kind, place=place, spots=tuple(spots), detail="a detail")


def lines(*curves: Curve, **fields: object) -> LineChart:
    known: dict[str, object] = {
        "chart": "lines",
        "name": "picture",
        "title": "Title",
        "x_label": "devices",
        "x_scale": "log2",
        "y_label": "MFU (a formula)",
        "y_scale": "share",
        "limit": None,
        "notes": ("A note.",),
    }
    return LineChart.model_construct(curves=curves, **(known | fields))  # type: ignore[arg-type]


def bars(*kinds: CurveKind, high: float = 1.2) -> BarChart:
    return BarChart(
        name="bars",
        title="Title",
        unit="milliseconds",
        better="lower",
        bars=tuple(
            Bar(label=f"{kind} bar", kind=kind, value=1, low=1, high=high, detail=kind) for kind in kinds
        ),
    )


def roofline(*names: str) -> RooflineChart:
    spots = (
        RooflineSpot(
            label=name, intensity=2.0**place, ours=1e12, baseline=None if place else 5e11, bound=2e12
        )
        for place, name in enumerate(names)
    )
    return RooflineChart(
        name="roof", title="Title", resource="fp32", copy_rate=4e12, peak_rate=3e13, spots=tuple(spots)
    )


MANY = lines(*(curve(f"run {place}", 0.5, 0.4, place=place) for place in range(16)))
SCALING = lines(curve("ours", 0.46, 0.45, spread=0.01), curve("theirs", 0.46, kind="published"))
CHARTS: dict[str, Callable[[], Chart]] = {
    "scaling": lambda: SCALING,
    "many": lambda: MANY,
    "one spot": lambda: lines(curve("one", 0.5)),
    "no curve": lines,
    "relative": lambda: lines(curve("a", 1, 0.96), y_scale="relative"),
    "zero": lambda: lines(curve("a", 0.0, 0.0), y_scale="count"),
    "not a number": lambda: lines(curve("a", math.nan, math.inf, 1.0), y_scale="linear", x_scale="linear"),
    "distance": lambda: lines(
        curve("a", math.nan, 1e-5, 2e-5), y_scale="log10", limit=0.01, x_scale="linear"
    ),
    "nothing apart": lambda: lines(curve("a", 0.0), y_scale="log10", limit=0.01, x_scale="linear"),
    "long": lambda: lines(*(curve("a", *[2.0] * 60, place=place) for place in range(3)), y_scale="linear"),
    "sizes": lambda: lines(curve("a", *range(1, 31)), curve("limit", 9, 9, kind="bound"), x_label="bytes"),
    "log10": lambda: lines(curve("a", 1, 2, 3), x_scale="log10", y_scale="count"),
    "bars": lambda: bars(*KINDS),
    "no bar": bars,
    "roofline": lambda: roofline("a", "b", "c"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_pictures_are_svg_with_title_and_description(name: str) -> None:
    chart = CHARTS[name]()
    picture = draw(chart)
    root = ET.fromstring(picture.svg)
    assert [child.tag.rpartition("}")[2] for child in root[:2]] == ["title", "desc"]
    assert root[0].text == "Title"
    assert root.attrib["role"] == "img"
    assert all(stand_in not in picture.svg for stand_in in COLOURS.values())
    assert "mathdefault" not in picture.svg
    assert {key.sign for key in picture.keys} <= {*SIGNS.values(), "╌"}


def test_the_same_chart_gives_the_same_bytes() -> None:
    assert draw(SCALING).svg == draw(SCALING).svg


def test_names_with_dollars_and_angles_are_text() -> None:
    assert "<script>" not in draw(lines(curve("$\\frac{1}{$ <script>", 0.5), title="<script>$")).svg


def test_a_limit_is_drawn_and_named() -> None:
    picture = draw(CHARTS["distance"]())
    assert picture.keys[-1].label == "limit: 0.01"
    assert "var(--limit)" in picture.svg


@pytest.mark.parametrize("x_scale", ["linear", "log10"])
@pytest.mark.parametrize("y_scale", ["linear", "log10"])
def test_axes_reach_over_the_curve(x_scale: str, y_scale: str) -> None:
    svg = draw(lines(curve("a", *[300.0] * 6, 800.0, spread=0.1), x_scale=x_scale, y_scale=y_scale)).svg
    ticks = {child.text for child in ET.fromstring(svg).iter() if child.tag.endswith("text")}
    assert {"linear": "48", "log10": "50"}[x_scale] in ticks, ticks
    assert {"linear": "800", "log10": "500"}[y_scale] in ticks, ticks


def test_large_counts_are_in_powers_of_1024() -> None:
    svg = draw(CHARTS["sizes"]()).svg
    assert ">16Ki<" in svg or ">16Mi<" in svg or ">1Mi<" in svg


def test_bars_name_their_kinds_and_what_is_better() -> None:
    picture = draw(bars("published", "measured", "measured"))
    assert [key.label for key in picture.keys] == ["published", "measured"]
    assert picture.notes[0] == "Lower is better."


def test_no_two_curves_of_a_picture_look_the_same() -> None:
    looks = [
        look_of(kind, place)
        for kind, count in zip(KINDS, (72, 2, 2, 1, 1), strict=True)
        for place in range(count)
    ]
    assert len({(look.colour, look.mark) for look in looks}) == len(looks)


def test_a_curve_looks_the_same_in_every_picture() -> None:
    alone = draw(lines(MANY.curves[7])).keys[0]
    assert alone == draw(MANY).keys[7]


def test_every_call_of_a_roofline_has_its_mark() -> None:
    keys = draw(roofline(*"abcdefghij")).keys
    marks = [key.sign for key in keys if key.colour == "ink"]
    assert len(set(marks)) == len(marks) == 10


@settings(deadline=None, max_examples=25)
@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_labels_cover_neither_each_other_nor_marks(values: list[float]) -> None:
    marks = [(2.0 ** (place % 3), value) for place, value in enumerate(values)]
    with canvas() as (_, axes):
        axes.set(xlim=(0.5, 8), ylim=(0, 1.2))
        chosen = [ChartLabel(x=x, value=y, text=f"{y:.1%}", colour="ink") for x, y in marks]
        write_labels(axes, chosen, marks=[(x, y, 0.0) for x, y in marks])
        boxes = [one.get_window_extent() for one in axes.texts]
        for place, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:place])
            assert not any(box.contains(*axes.transData.transform(mark)) for mark in marks)


@given(
    boxes=st.lists(st.tuples(st.floats(-50, 150), st.floats(1, 10)), min_size=1, max_size=8),
)
def test_names_beside_the_axes_never_overlap(boxes: list[tuple[float, float]]) -> None:
    boxes.sort(reverse=True)
    heights = [height for _, height in boxes]
    found = charts.spread([middle for middle, _ in boxes], heights, 100.0)
    ends = [(middle + height / 2, middle - height / 2) for middle, height in zip(found, heights, strict=True)]
    assert ends[0][0] <= 100.0 + 1e-6
    assert ends[-1][1] >= -1e-6
    assert all(above[1] >= below[0] - 1e-6 for above, below in itertools.pairwise(ends))


def test_what_was_published_has_the_axes_of_what_was_measured() -> None:
    published = curve("published: a card", 0.2, kind="published")
    both = draw_beside(lines(published, curve("here", 0.9)))
    assert [one.title for one in both] == ["Published: Title", "Measured: Title"]
    ticks = [re.findall(r">([\d.]+%?)</text>", one.svg) for one in both]
    assert ticks[0][:6] == ticks[1][:6]
    assert all(one.named for one in both)
    assert len(draw_beside(lines(published))) == 1
