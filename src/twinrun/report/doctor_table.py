"""The findings of `invoke doctor` as a table for a terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from twinrun.doctor import Examination

# Colour repeats the word beside it; it never carries meaning alone.
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "unknown": "magenta"}


def examination_table(examination: Examination) -> Table:
    """Return one row for each finding, hints on lines of their own."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("check", "status", "found", "needed"):
        table.add_column(heading, overflow="fold")
    for check in examination.checks:
        status = Text(check.status, style=_STYLES[check.status])
        table.add_row(Text(check.name), status, Text(check.found), Text(check.needed))
        if check.hint:
            table.add_row("", "", Text(f"hint: {check.hint}", style="italic"), "")
    return table
