"""Where text is printed: what comes from names, records and logs is shown there, and never obeyed."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from twinrun.foundation.text import visible


def say(text: object = "", *, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print `text` on stdout, or on `file`, with what is no text in it as numbers."""
    print(visible(str(text)), file=file or sys.stdout, end=end, flush=flush)


class VisibleConsole(Console):
    """A console that obeys its own views alone, and nothing that stands in them."""

    def on_broken_pipe(self) -> None:
        """Leave the error to the command, which has an exit code for it; Rich would end with 1."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the pieces of a view; text in them is visible, cursor movements are those of the view."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
