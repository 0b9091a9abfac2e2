"""What a user sees while a run goes on: bars on a terminal, plain lines elsewhere; always stderr."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn

from twinrun.foundation.terminal import LiveProgress
from twinrun.workloads.workload import Progress as PointProgress


class Display(LiveProgress):
    """Progress of the points of one run."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
        )
        self._steps: dict[str, int] = {}
        self._sweep: TaskID | None = None

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
