"""Where text and progress are printed: names, records and logs are shown there, and never obeyed."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable
from typing import Self, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn, TaskID
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


class LiveProgress:
    """Rows of tasks that are drawn anew as they go on."""

    def __init__(self, *columns: ProgressColumn) -> None:
        self.console = VisibleConsole(stderr=True, highlight=False, soft_wrap=True, emoji=False)
        self._progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        # Stopping a disabled display prints an empty line in rich 13.
        if not self._progress.disable:
            self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if not self._progress.disable:
            self._progress.stop()

    def say(self, text: str) -> None:
        """Print one line of the log."""
        self.console.print(visible(text), markup=False)
