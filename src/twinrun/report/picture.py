"""Pictures as SVG text in the style of the page around them: colours, marks, axes and what is written out."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from markupsafe import escape
from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import number, visible

# Attributes of SVG that place something, and numbers of more digits than they need.
PLACED = re.compile(r'\b(?:d|x|y|points|transform)="[^"]*"')
LONG = re.compile(r"-?\d+\.\d{2,}(?![\de])")
# The fonts that Matplotlib names in each text.
FONTS = ", ".join([*(f"'{name}'" for name in rcParamsDefault["font.sans-serif"][:-1]), "sans-serif"])
SERIES = 8
# Inches of a picture of curves.
HEIGHT = 3.4
# A logarithmic axis that is shorter than this many times its start has room for three labels a decade.
LABELLED_THRICE = 300
# Marks of matplotlib, and the characters that stand for them in text.
SIGNS = dict(zip("o^svp>h<D*XPdHx+14_", "●▲■▼⬟▶⬢◀◆★✖✚♦⬣✕+⅄≻━", strict=True))
# Stand-ins that occur nowhere else; in the SVG each becomes the CSS variable it is named after.
COLOURS = {
    "ink": "#01f001",
    "grid": "#01f002",
    "paper": "#01f003",
    "published": "#01f004",
    "reference": "#01f005",
    "baseline": "#01f006",
    "limit": "#01f007",
    **{f"series-{place + 1}": f"#01f01{place}" for place in range(SERIES)},
}
# Any: matplotlib's releases disagree about the type of these names.
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS["grid"],
    "axes.grid": True,
    "axes.labelcolor": COLOURS["ink"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 11,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 6,
    "svg.fonttype": "none",
    "svg.hashsalt": "twinrun",
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
    named: bool = False
    """Whether names stand at the curves, so that the legend is for their sources alone."""


@contextmanager
def canvas(*, height: float = HEIGHT) -> Iterator[tuple[Figure, Axes]]:
    """Give a figure in the page's style, wide enough for a telephone, `height` inches high."""
    with rc_context(STYLE):
        figure = Figure(figsize=(5, height), layout="constrained")
        yield figure, figure.add_subplot()


def label_logarithmic(axis: Axis) -> None:
    """Label a logarithmic axis in plain numbers, once its limits are set.

    Matplotlib's own, also those it adds on a short axis, are mathematical text: SVG would show its source.
    """
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < LABELLED_THRICE * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(NullFormatter())


def lay_out(figure: Figure) -> None:
    """Place the axes by what is drawn so far, once: what is drawn later moves nothing."""
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        # An engine, also one that does nothing, makes Matplotlib draw twice.
        figure.set_layout_engine(None)


def svg_text(figure: Figure, *, name: str, title: str, description: str) -> str:
    """Render `figure` for a page; `name` is unique on the page and starts every identifier.

    The same figure gives the same bytes.
    """
    lay_out(figure)
    stream = io.StringIO()
    without = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(stream, format="svg", transparent=True, metadata=without)
    text = stream.getvalue()
    # Its style sheet would reach the whole page; the page has the same rule for its own pictures.
    text = re.sub(r"<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # Names of groups, which nothing refers to, and of fonts, which the page has, are a half of the rest.
    text = re.sub(r'<g id="[^"]*">', "<g>", text).replace(FONTS, "sans-serif")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    # A tenth of a pixel is all that a reader sees, and places are most of what a picture weighs.
    text = PLACED.sub(lambda found: LONG.sub(lambda one: f"{float(one[0]):.1f}", found[0]), text)
    for variable, stand_in in COLOURS.items():
        text = text.replace(stand_in, f"var(--{variable})")
    opening, rest = text.split(">", 1)
    opening = re.sub(r' (width|height|version)="[^"]*"', "", opening)
    return (
        f'{opening} role="img" aria-labelledby="{name}-title {name}-description">'
        f'<title id="{name}-title">{escape(visible(title))}</title>'
        f'<desc id="{name}-description">{escape(visible(description))}</desc>{rest}'
    )
