"""Where views are printed: a terminal of its own width, or a pipe that is wide enough."""

from __future__ import annotations

import os
import sys

from rich.console import Console, RenderableType

PIPE_COLUMNS = 160


def show(view: RenderableType) -> None:
    """Print `view` on stdout, as wide as the terminal is; COLUMNS says so too."""
    stream = sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a locale of ASCII lacks the signs of verdicts
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    Console(file=stream, width=width, highlight=False).print(view)
