"""Pictures: SVG with title and description, one for one chart, in which no mark has two meanings."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from twinrun.report.charts import HOLLOW, SIGNS, draw, look_of, sign_of
from twinrun.report.picture import COLOURS, Picture
from twinrun.workloads.tables_and_charts import (
    Chart,
    Curve,
    CurveKind,
    LineChart,
    Mark,
    MarkKind,
    Row,
    RowChart,
    Spot,
)

KINDS: tuple[CurveKind, ...] = ("measured", "published", "reference", "baseline", "bound")


def curve(label: str, *values: float, kind: CurveKind = "measured", place: int = 0) -> Curve:
    spots = [
        Spot.model_construct(x=2.0**power, value=one, low=one, high=one) for power, one in enumerate(values)
    ]
    # As workloads do where a curve has gaps: not a number is no field of a record.
    return Curve.model_construct(label=label, kind=kind, place=place, spots=tuple(spots), detail="a detail")


def lines(*curves: Curve, **fields: object) -> LineChart:
    known: dict[str, object] = {"name": "picture", "title": "Title", "x_label": "devices", "x_scale": "log2"}
    known |= {"y_label": "MFU (a formula)", "y_scale": "share", "limit": None, "notes": ("A note.",)}
    return LineChart.model_construct(curves=curves, **(known | fields))  # type: ignore[arg-type]


def mark(kind: CurveKind, value: float = 1, high: float = 1.2) -> Mark:
    return Mark(kind=kind, value=value, low=value, high=high, detail=kind)


def rows(*drawn: Row, ticks: dict[float, str] | None = None) -> RowChart:
    return RowChart(name="rows", title="Title", x_label="tokens/s of a device", rows=drawn, ticks=ticks)


MANY = lines(*(curve(f"run {place}", 0.5, 0.4, place=place) for place in range(16)))
EVIL = lines(curve("$\\frac{1}{$ <script>", 0.5), title="<script>$")
LINEAR = {"y_scale": "linear", "x_scale": "linear"}
APART = {"y_scale": "log10", "limit": 0.01, "x_scale": "linear"}
CHARTS: dict[str, Chart] = {
    "scaling": lines(curve("ours", 0.46, 0.45), curve("theirs", 0.46, kind="published")),
    "many": MANY,
    "one spot": lines(curve("one", 0.5)),
    "no curve": lines(),
    "relative": lines(curve("a", 1, 0.96), y_scale="relative"),
    "zero": lines(curve("a", 0.0, 0.0), y_scale="count"),
    "not a number": lines(curve("a", math.nan, math.inf, 1.0), **LINEAR),
    "distance": lines(curve("a", math.nan, 1e-5, 2e-5), **APART),
    "nothing apart": lines(curve("a", 0.0), **APART),
    "long": lines(*(curve("a", *[2.0] * 60, place=place) for place in range(3)), y_scale="linear"),
    "sizes": lines(curve("a", *range(1, 31)), curve("limit", 9, 9, kind="bound"), x_label="bytes"),
    "log10": lines(curve("a", 1, 2, 3), x_scale="log10", y_scale="count"),
    "rows": rows(*(Row(label=f"{kind} row", marks=(mark(kind),)) for kind in KINDS)),
    "no row": rows(),
}


def texts(picture: Picture) -> set[str | None]:
    return {one.text for one in ET.fromstring(picture.svg).iter() if one.tag.endswith("text")}


@pytest.mark.parametrize("name", CHARTS)
def test_pictures_are_svg_with_title_and_description(name: str) -> None:
    picture = draw(CHARTS[name])
    root = ET.fromstring(picture.svg)
    assert [child.tag.rpartition("}")[2] for child in root[:2]] == ["title", "desc"]
    assert (root[0].text, root.attrib["role"]) == ("Title", "img")
    assert not [stand_in for stand_in in (*COLOURS.values(), "mathdefault") if stand_in in picture.svg]
    assert {key.sign for key in picture.keys} <= {*SIGNS.values(), "╌"}
    identifiers = [one.attrib["id"] for one in root.iter() if "id" in one.attrib]
    assert len(identifiers) == len(set(identifiers))
    assert all(one.startswith(CHARTS[name].name) for one in identifiers)
    assert draw(CHARTS[name]).svg == picture.svg


def test_names_are_text_limits_are_named_and_large_counts_are_in_powers_of_1024() -> None:
    assert "<script>" not in draw(EVIL).svg
    assert draw(CHARTS["distance"]).keys[-1].label == "limit: 0.01"
    assert "var(--limit)" in draw(CHARTS["distance"]).svg
    assert texts(draw(CHARTS["sizes"])) & {"16Ki", "16Mi", "1Mi"}


def test_no_two_curves_of_a_picture_look_the_same_and_each_looks_the_same_in_every_picture() -> None:
    counts = zip(KINDS, (72, 2, 2, 1, 1), strict=True)
    looks = [look_of(kind, place) for kind, count in counts for place in range(count)]
    assert len({(look.colour, look.mark) for look in looks}) == len(looks)
    assert draw(lines(MANY.curves[7])).keys[0] == draw(MANY).keys[7]
    kinds: tuple[MarkKind, ...] = (*KINDS, "predicted")
    assert len({sign_of(kind) for kind in kinds}) == len(kinds)
    assert sign_of("predicted") == HOLLOW


def test_a_row_has_its_name_its_values_and_the_unit_of_the_axis() -> None:
    marks = (mark("published", 12, 12), mark("measured", 13, 13.5))
    picture = draw(rows(Row(label="a GPU", marks=marks), Row(label="another", said="does not fit")))
    named = {"a GPU", "another", "◆ 12  ● 13", "does not fit", "tokens/s of a device", "published"}
    assert named <= texts(picture)
    assert [key.detail for key in picture.keys] == ["published", "measured"]
