"""Published, measured and predicted, in one picture of the figures that this project is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twinrun.foundation.text import percent
from twinrun.report.hardware import PRECISION, SIGNS, HardwareChoice, Mark, ModelChoices, per_device
from twinrun.report.page import page_environment

FILE = Path("docs", "assets", "headline.svg")
# Pixels: as wide as a telephone, so that its text is as large as that of the page.
WIDTH, MARGIN, ROW, HEAD, FOOT = 420, 10, 42, 34, 26
NAMES: dict[Mark, str] = {
    "published": "published",
    "measured": "measured here",
    "predicted": "predicted, with its interval",
}
# Pixels of a letter, taken wide: the font is the reader's.
LETTER = 7.4
TITLE = "Share of the dense 16-bit peak that training reached"


@dataclass(frozen=True)
class HeadlineRow:
    """A model on a GPU: shares of the dense 16-bit peak, None where nobody has the number."""

    model: str
    gpu: str
    published: float | None
    measured: float | None
    predicted: tuple[float, float, float] | None
    """Value, and the ends of its interval."""

    def shares(self) -> list[tuple[Mark, str]]:
        """Return what is known, in percent."""
        predicted = self.predicted[0] if self.predicted else None
        known: dict[Mark, float | None] = {
            "published": self.published,
            "measured": self.measured,
            "predicted": predicted,
        }
        return [(mark, percent(share)) for mark, share in known.items() if share]


def headline_rows(found: Sequence[ModelChoices]) -> list[HeadlineRow]:
    """Return a row for each model and GPU that a recipe's claim is about, or that a record measured."""
    return [
        _row(one, choice)
        for one in found
        for choice in one.choices
        if choice.precision == PRECISION and any(rate.mark != "reference" for rate in choice.known)
    ]


def _row(one: ModelChoices, choice: HardwareChoice) -> HeadlineRow:
    token = one.shape.flops_per_token() / choice.gpu.device_peak_flops
    published, measured = (
        max((per_device(rate) for rate in choice.of(mark)), default=0.0) * token or None
        for mark in ("published", "measured")
    )
    two = choice.predicted
    predicted = None
    if two and choice.way and two.interval and two.tokens_per_second:
        low, high = two.interval
        predicted = (two.tokens_per_second * token, low * token, high * token)
    return HeadlineRow(one.name, choice.gpu.name, published, measured, predicted)


def draw_headline(rows: Sequence[HeadlineRow]) -> str:
    """Return the picture as SVG that takes its colours from the page around it."""
    shares = [one for row in rows for one in (row.published, row.measured, *(row.predicted or ())) if one]
    # The axis ends at the next tenth.
    end = int(max(shares, default=0.5) * 10) + 1
    said = "; ".join(
        f"{row.model} on {row.gpu}: {', '.join(f'{mark} {share}' for mark, share in row.shares())}"
        for row in rows
    )
    return drawn_svg(
        "headline.svg.j2",
        height=HEAD + ROW * len(rows) + FOOT,
        title=TITLE,
        said=said,
        rows=rows,
        end=end,
        x=lambda share: round(MARGIN + share / (end / 10) * (WIDTH - 2 * MARGIN), 1),
        head=HEAD,
        row_height=ROW,
        foot=FOOT,
    )


def drawn_svg(template: str, **content: object) -> str:
    """Return a picture of published, measured and predicted numbers, with its legend."""
    legend, x = list[tuple[Mark, str, float]](), float(MARGIN)
    for mark, label in NAMES.items():
        legend.append((mark, label, x))
        x += LETTER * len(f"{SIGNS[mark]} {label}") + 14
    shared = {"width": WIDTH, "margin": MARGIN, "signs": SIGNS, "legend": legend}
    return page_environment().get_template(template).render(**shared, **content) + "\n"


def standalone(svg: str) -> str:
    """Return a picture that brings the colours of a page with it, light and dark."""
    palette = Path(__file__).with_name("palette.css").read_text(encoding="utf-8")
    opening, rest = svg.split(">", 1)
    paper = '<rect width="100%" height="100%" fill="var(--paper)"/>'
    return f"{opening}>\n<style>{palette}</style>\n{paper}{rest}"
