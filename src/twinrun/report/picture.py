"""Pictures as SVG text in the style of the page around them."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from markupsafe import escape
from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import number, visible

SERIES = 8
# Inches: as wide as a telephone shows text of the page's size.
WIDTH, HEIGHT = 5.0, 3.4
# A logarithmic axis that is shorter than this many times its start has room for three labels a decade.
LABELLED_THRICE = 300
# Of the SVG: a style sheet that would reach the whole page, names of groups that nothing refers to, and
# digits beyond a tenth of a pixel in attributes that place something.
_UNUSED = re.compile(
    r'<style.*?</style>| id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|[xy]tick)_\d+"', re.DOTALL
)
_PLACES = re.compile(r'\b(?:d|x|y|points|transform)="[^"]*"')
_LONG = re.compile(r"(-?\d+\.\d)\d+(?![\de])")
# The fonts that Matplotlib names in each text.
_FONTS = ", ".join([*(f"'{name}'" for name in rcParamsDefault["font.sans-serif"][:-1]), "sans-serif"])
# Stand-ins that occur nowhere else; in the SVG each becomes the CSS variable it is named after.
_VARIABLES = ("ink", "grid", "paper", "published", "measured", "predicted", "reference", "baseline", "limit")
COLOURS = {
    name: f"#01f0{place:02x}"
    for place, name in enumerate((*_VARIABLES, *(f"series-{place + 1}" for place in range(SERIES))))
}
# Any: matplotlib's releases disagree about the type of these names.
_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS["grid"],
    "axes.grid": True,
    "axes.labelcolor": COLOURS["ink"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 11,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",
    "text.color": COLOURS["ink"],
    # Names come from machines; a dollar sign in one is not the start of a formula.
    "text.parse_math": False,
    "xtick.color": COLOURS["ink"],
    "ytick.color": COLOURS["ink"],
}


class Key(Frozen):
    """One entry of a picture's legend."""

    sign: str
    colour: str
    """CSS variable of the page, without its dashes."""
    label: str
    detail: str = ""


class Picture(Frozen):
    """An inline SVG and all that stands under it."""

    svg: str
    title: str
    keys: tuple[Key, ...]
    notes: tuple[str, ...]


@contextmanager
def canvas(*, height: float = HEIGHT) -> Iterator[tuple[Figure, Axes]]:
    """Give a figure in the page's style, `height` inches high."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, figure.add_subplot()


def label_logarithmic(axis: Axis) -> None:
    """Label a logarithmic axis in plain numbers, once its limits are set.

    Matplotlib's own, also those it adds on a short axis, are mathematical text: SVG would show its source.
    """
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < LABELLED_THRICE * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(NullFormatter())


def svg_text(figure: Figure, *, name: str, title: str, description: str) -> str:
    """Render `figure` for a page; `name` is unique on the page, and the identifiers come from it.

    The same figure gives the same bytes.
    """
    stream = io.StringIO()
    without = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", transparent=True, metadata=without)
    text = stream.getvalue()
    text = _UNUSED.sub("", text[text.index("<svg") :]).replace(_FONTS, "sans-serif")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = _PLACES.sub(lambda found: _LONG.sub(r"\1", found[0]), text)
    for variable, stand_in in COLOURS.items():
        text = text.replace(stand_in, f"var(--{variable})")
    opening, rest = text.split(">", 1)
    opening = re.sub(r' (width|height|version)="[^"]*"', "", opening)
    return (
        f'{opening} role="img" aria-labelledby="{name}-title {name}-description">'
        f'<title id="{name}-title">{escape(visible(title))}</title>'
        f'<desc id="{name}-description">{escape(visible(description))}</desc>{rest}'
    )


def standalone(svg: str) -> str:
    """Return a picture that brings the colours of a page with it, light and dark."""
    palette = Path(__file__).with_name("palette.css").read_text(encoding="utf-8")
    opening, rest = svg.split(">", 1)
    paper = '<rect width="100%" height="100%" fill="var(--paper)"/>'
    style = f"<style>{palette} text {{ font-family: var(--text) !important }}</style>"
    return f"{opening}>\n{style}\n{paper}{rest}"
