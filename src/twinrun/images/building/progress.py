"""Progress of a build on stderr: a line for each layer on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_MEGABYTE = 1_000_000
_LINE = 110


class BuildProgress:
    """Progress of one build."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description:9}", markup=False),
            TextColumn("{task.fields[size]:>10}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}

    def __enter__(self) -> BuildProgress:
        if not self._progress.disable:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._progress.disable:
            self._progress.stop()

    def say(self, text: str) -> None:
        """Print one line of the log."""
        self.console.print(text, markup=False)

    def start_layer(self, layer: str) -> None:
        """Show that the build of a layer has started."""
        self._started[layer] = time.monotonic()
        self._tasks[layer] = self._progress.add_task(layer, total=1, size="", status="")

    def step(self, layer: str, text: str) -> None:
        """Show the instruction of the Dockerfile that runs."""
        self._progress.update(self._tasks[layer], status=text[: max(20, self.console.width - 40)])
        if not self.console.is_terminal:
            self.say(f"{layer}: {text[:_LINE]}")

    def update_size(self, layer: str, size: int) -> None:
        """Show the size of a layer so far, in bytes."""
        self._progress.update(self._tasks[layer], size=megabytes(size))

    def finish_layer(self, layer: str, *, size: int, digest: str) -> None:
        """Show that a layer is complete."""
        status = digest.removeprefix("sha256:")[:12]
        self._progress.update(self._tasks[layer], size=megabytes(size), status=status, completed=1)
        if not self.console.is_terminal:
            seconds = time.monotonic() - self._started[layer]
            self.say(f"{layer}: {megabytes(size)}  {seconds:.1f} s  {status}")


def megabytes(size: int) -> str:
    """Return a size in bytes as megabytes."""
    return f"{size / _MEGABYTE:,.1f} MB"
