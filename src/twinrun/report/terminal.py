"""Where views are printed, and what `invoke doctor` prints there."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from twinrun.foundation.terminal import VisibleConsole
from twinrun.machine.doctor import Diagnosis

PIPE_COLUMNS = 160
# The table that a run ends with can be pasted anywhere.
RUN_COLUMNS = 99
# Colour repeats the word beside it; it never carries meaning alone.
_STYLES = {"ok": "green", "absent": "dim", "warn": "yellow", "fail": "bold red", "unknown": "magenta"}
_INDENT = "    "
_STATUS_WIDTH = max(map(len, _STYLES)) + 2


def show(view: RenderableType, *, most: int = PIPE_COLUMNS) -> None:
    """Print `view` on stdout, as wide as the terminal is, or COLUMNS says, and at most `most` columns."""
    stream = sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a locale of ASCII lacks the signs of verdicts
    width = None if stream.isatty() or "COLUMNS" in os.environ else most
    console = VisibleConsole(file=stream, width=width, highlight=False)
    console.print(view, width=min(console.width, most))


def diagnosis_lines(diagnosis: Diagnosis, *, width: int | None) -> Iterator[Text]:
    """Yield the lines of each check, wrapped between words to `width`; None wraps nothing."""
    name_width = max(len(check.name) for check in diagnosis.checks) + 2
    column = " " * (name_width + _STATUS_WIDTH)
    yield Text("check".ljust(name_width) + "status".ljust(_STATUS_WIDTH) + "found")
    for check in diagnosis.checks:
        well = check.status in ("ok", "absent")
        found = f"{check.found}; {check.needed}" if check.status == "absent" else check.found
        first, *others = _wrapped(found, width, column) or [""]
        status = Text(check.status.ljust(_STATUS_WIDTH), style=_STYLES[check.status])
        yield Text(check.name.ljust(name_width)) + status + Text(first.strip())
        for label, text in () if well else (("needed", check.needed), ("hint", check.hint)):
            others += _wrapped(f"{label}: {text}", width, _INDENT) if text else []
        yield from map(Text, others)


def _wrapped(text: str, width: int | None, indent: str) -> list[str]:
    """Return the indented lines of `text`; a path that is longer than a line stays whole, to be copied."""
    return textwrap.wrap(
        text,
        width or len(indent + text) + 1,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
