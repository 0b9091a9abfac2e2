"""Pictures as data: what is drawn over what; `twinrun.report` draws them."""

from __future__ import annotations

from typing import Literal

from twinrun.foundation.manifest import Frozen

Kind = Literal["measured", "published", "reference", "baseline", "bound"]


class Spot(Frozen):
    """One point of a curve, with the lowest and highest of its samples."""

    x: float
    value: float
    low: float
    high: float


class Curve(Frozen):
    """Spots that belong together."""

    label: str
    kind: Kind
    place: int
    """Among those of its kind; the same series has the same place in every chart."""
    spots: tuple[Spot, ...]
    detail: str = ""
    """The numbers as they stand in the source, and which source."""


class LineChart(Frozen):
    """Curves over one axis."""

    chart: Literal["lines"] = "lines"
    name: str
    """Identifier in the page."""
    title: str
    x_label: str
    x_scale: Literal["log2", "log10", "linear"]
    y_label: str
    """With unit and formula."""
    y_scale: Literal["share", "relative", "count", "linear", "log10"]
    """`share` is drawn in percent, `count` from zero; `relative` is to the first spot of each curve."""
    curves: tuple[Curve, ...]
    limit: float | None = None
    """A line that curves should stay below."""
    notes: tuple[str, ...] = ()
    """What a reader must know to read it right."""


class Bar(Frozen):
    """One value; `low` and `high` are the extremes of its samples."""

    label: str
    kind: Kind
    value: float
    low: float
    high: float
    detail: str


class BarChart(Frozen):
    """Bars of one quantity."""

    chart: Literal["bars"] = "bars"
    name: str
    title: str
    unit: str
    better: Literal["higher", "lower"]
    bars: tuple[Bar, ...]
    notes: tuple[str, ...] = ()


class RooflineSpot(Frozen):
    """One call: operations for a byte, and operations a second of ours, the baseline and the bound."""

    label: str
    intensity: float
    ours: float
    baseline: float | None
    bound: float | None


class RooflineChart(Frozen):
    """Calls under the peak rates of their device."""

    chart: Literal["roofline"] = "roofline"
    name: str
    title: str
    resource: str
    """The resource that the vertical axis counts."""
    copy_rate: float
    """Bytes a second."""
    peak_rate: float
    """Operations a second."""
    spots: tuple[RooflineSpot, ...]
    notes: tuple[str, ...] = ()


Chart = LineChart | BarChart | RooflineChart
