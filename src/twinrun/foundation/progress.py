"""Progress on a terminal, lines of a log elsewhere; always stderr."""

from __future__ import annotations

from typing import Self

from rich.progress import Progress, ProgressColumn, TaskID

from twinrun.foundation.terminal import VisibleConsole
from twinrun.foundation.text import visible


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
