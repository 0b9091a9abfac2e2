"""Text for people: numbers in words, the same on every surface."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

GIB, MIB, TERA = 1 << 30, 1 << 20, 1e12


def number(value: float) -> str:
    """Return four significant digits, thousands separated."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 0.001 or value == 0 else f"{value:.2g}"


def percent(share: float) -> str:
    """Return a share of one in percent."""
    return f"{share:.1%}"


def plain(value: str | int | float | bool | tuple[str | int | float | bool, ...]) -> str:
    """Return a value of a configuration, thousands separated; of several, any of them."""
    if isinstance(value, tuple):
        return " or ".join(plain(one) for one in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """Return a number of bytes in MiB, or in GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Return a time as a person would say it: seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# Characters that move a cursor, hide text or turn its order: controls but for tab and newline, marks of
# direction, separators that some programs take for a newline, what has no width, and halves of characters.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return `text` with what a terminal or a browser would obey, and not show, written as its number."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
