"""What a user sees while a run goes on: bars on a terminal, plain lines elsewhere; always stderr."""

from __future__ import annotations

from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from twinrun.foundation.terminal import VisibleConsole
from twinrun.foundation.text import visible
from twinrun.workloads.workload import Progress as PointProgress


class Display:
    """Progress of the points of one run."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = VisibleConsole(stderr=True, quiet=quiet, highlight=False, soft_wrap=True, emoji=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._steps: dict[str, int] = {}
        self._sweep: TaskID | None = None

    def __enter__(self) -> Display:
        # Stopping a disabled display prints an empty line in rich 13.
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
        self.console.print(visible(text), markup=False)

    def expect(self, points: int, *, done: int) -> None:
        """Show how many points a sweep has, and how many of them are done."""
        if points > 1:
            self._sweep = self._progress.add_task("sweep", total=points, status="", completed=done)

    def begin(self, point: str, *, steps: int, status: str) -> None:
        """Show that `point` starts; called again when it starts over."""
        self._steps[point] = steps
        if point in self._tasks:
            self._progress.reset(self._tasks[point], total=steps, status=status)
        else:
            self._tasks[point] = self._progress.add_task(point, total=steps, status=status)
        self._line(f"{point}: {status}")

    def step(self, point: str, progress: PointProgress) -> None:
        """Show one line of metrics."""
        steps = self._steps[point]
        task = self._tasks[point]
        if progress.done:
            self._progress.update(task, status=progress.status, completed=progress.done)
        else:
            self._progress.update(task, status=progress.status, advance=1)
        if not progress.done:
            self._line(f"{point}: {progress.status}")
        elif progress.done in (1, steps) or progress.done % max(1, steps // 8) == 0:
            self._line(f"{point}: step {progress.done}/{steps}  {progress.status}")

    def end(self, point: str, *, status: str) -> None:
        """Show the result of `point`."""
        if point in self._tasks:
            self._progress.update(self._tasks[point], status=status)
        self._line(f"{point}: {status}")

    def point_done(self) -> None:
        """Count a finished point of the sweep."""
        if self._sweep is not None:
            self._progress.update(self._sweep, advance=1)

    def _line(self, text: str) -> None:
        if not self.console.is_terminal:
            self.say(text)
