"""Words and lines of a shell in which nothing is replaced but variables that we name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from twinrun.foundation.errors import InputError

# Variables of a scheduler's script for what is known only where a command starts.
FIRST_NODE, NODE, RANK, LOCAL_RANK, PORT = (
    f"TWINRUN_{name}" for name in ("FIRST_NODE", "NODE", "RANK", "LOCAL_RANK", "PORT")
)
# The shell variable that stands for the run folder, and the folder of a workspace to render with.
RUN = "$RUN"
RUN_FOLDER = Path(RUN)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def quoted(text: str, names: Iterable[str], *, line: bool = False) -> str:
    """Return `text` as one word of bash; each `$NAME` of `names` in it is left to the shell.

    Args:
        line: as one line too, so that nothing in it begins a line.

    Raises:
        InputError: a NUL, which no argument has, or what is no Unicode.
    """
    if "\0" in text or (not text.isprintable() and text.encode(errors="replace").decode() != text):
        raise InputError(
            "no argument has a NUL, or what is no Unicode", place="script", found=ascii(text)[:80]
        )
    pattern = "|".join(rf"\${re.escape(name)}(?![A-Za-z0-9_])" for name in names)
    words = [
        f'"{part}"' if number % 2 else _in_line(part) if line else shlex.quote(part)
        for number, part in enumerate(re.split(f"({pattern})", text) if pattern else [text])
        if part
    ]
    return "".join(words) or "''"


def _in_line(part: str) -> str:
    if not _CONTROL.search(part):
        return shlex.quote(part)
    escaped = part.replace("\\", "\\\\").replace("'", "\\'")
    return (
        "$'" + _CONTROL.sub(lambda found: "".join(f"\\{one:03o}" for one in found[0].encode()), escaped) + "'"
    )
