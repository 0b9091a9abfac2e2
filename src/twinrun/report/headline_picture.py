"""Published, measured and predicted, in one picture of the figures that this project is about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import escape

from twinrun.foundation.text import percent
from twinrun.report.hardware import PRECISION, HardwareChoice, Mark, ModelChoices, per_device

FILE = Path("docs", "assets", "headline.svg")
# Pixels: as wide as a telephone, so that its text is as large as that of the page.
WIDTH, MARGIN, ROW, HEAD, FOOT = 420, 10, 42, 34, 26
# A mark for each kind, so that colour never carries it alone: a diamond, a disc, a ring.
SIGNS: dict[Mark, str] = {"published": "◆", "measured": "●", "predicted": "○"}
NAMES: dict[Mark, str] = {
    "published": "published",
    "measured": "measured here",
    "predicted": "predicted, with its interval",
}
# Pixels of a letter, taken wide: the font is the reader's.
LETTER = 7.4
ABOUT = 'role="img" aria-labelledby="headline-title headline-said" font-family="var(--text)" font-size="12.5"'
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

    def values(self) -> Iterator[tuple[Mark, float]]:
        """Yield what is known."""
        if self.published:
            yield "published", self.published
        if self.measured:
            yield "measured", self.measured
        if self.predicted:
            yield "predicted", self.predicted[0]


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
    height = HEAD + ROW * len(rows) + FOOT
    said = "; ".join(
        f"{row.model} on {row.gpu}: {', '.join(f'{mark} {percent(value)}' for mark, value in row.values())}"
        for row in rows
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {ABOUT}>',
        f'<title id="headline-title">{TITLE}</title><desc id="headline-said">{escape(said)}</desc>',
        *_axis(rows, height),
    ]
    for place, row in enumerate(rows):
        parts += _drawn(row, HEAD + ROW * place, _end(rows))
    return "\n".join([*parts, "</svg>"]) + "\n"


def standalone(svg: str) -> str:
    """Return a picture that brings the colours of a page with it, light and dark."""
    palette = Path(__file__).with_name("palette.css").read_text(encoding="utf-8")
    opening, rest = svg.split(">", 1)
    paper = '<rect width="100%" height="100%" fill="var(--paper)"/>'
    return f"{opening}>\n<style>{palette}</style>\n{paper}{rest}"


def _end(rows: Sequence[HeadlineRow]) -> float:
    """Return where the axis ends: the next tenth."""
    values = [value for row in rows for _, value in row.values()]
    values += [row.predicted[2] for row in rows if row.predicted]
    return (int(max(values, default=0.5) * 10) + 1) / 10


def _x(share: float, end: float) -> float:
    return round(MARGIN + share / end * (WIDTH - 2 * MARGIN), 1)


def _axis(rows: Sequence[HeadlineRow], height: int) -> Iterator[str]:
    end, bottom, x = _end(rows), height - FOOT + 4, float(MARGIN)
    for mark, label in NAMES.items():
        text = f"{SIGNS[mark]} {label}"
        yield f'<text x="{x:g}" y="18" fill="var(--{mark})">{text}</text>'
        x += LETTER * len(text) + 14
    for tenth in range(0, round(end * 10) + 1, 2):
        place = _x(tenth / 10, end)
        anchor = "start" if tenth == 0 else "end" if tenth == round(end * 10) else "middle"
        yield f'<path d="M{place:g} {HEAD}V{bottom}" stroke="var(--grid)" stroke-width=".7"/>'
        look = f'fill="var(--soft)" text-anchor="{anchor}"'
        yield f'<text x="{place:g}" y="{height - 6}" {look}>{tenth * 10}%</text>'


def _drawn(row: HeadlineRow, top: int, end: float) -> Iterator[str]:
    line = top + 28
    values = " ".join(
        f'<tspan fill="var(--{mark})" dx="6">{SIGNS[mark]} {percent(value)}</tspan>'
        for mark, value in row.values()
    )
    name = f'<tspan font-weight="600">{escape(row.model)}</tspan>, {escape(row.gpu.split(" ", 1)[-1])}'
    # Lines of the grid stop at the letters.
    halo = 'stroke="var(--paper)" stroke-width="3" paint-order="stroke"'
    yield f'<text x="{MARGIN}" y="{top + 14}" fill="var(--ink)" {halo}>{name}</text>'
    yield f'<text x="{WIDTH - MARGIN}" y="{top + 14}" text-anchor="end" {halo}>{values}</text>'
    yield f'<path d="M{MARGIN} {line}H{WIDTH - MARGIN}" stroke="var(--grid)"/>'
    if row.predicted:
        middle, low, high = (_x(share, end) for share in row.predicted)
        yield f'<path d="M{low:g} {line}H{high:g}" stroke="var(--predicted)" stroke-width="3" opacity=".6"/>'
        yield (
            f'<circle cx="{middle:g}" cy="{line}" r="5" fill="var(--paper)"'
            ' stroke="var(--predicted)" stroke-width="2"/>'
        )
    if row.measured:
        yield f'<circle cx="{_x(row.measured, end):g}" cy="{line}" r="5" fill="var(--measured)"/>'
    if row.published:
        place = _x(row.published, end)
        yield f'<path d="M{place - 6:g} {line}l6 -6 6 6 -6 6z" fill="var(--published)"/>'
