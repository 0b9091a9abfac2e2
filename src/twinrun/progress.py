"""What a user sees while a run goes on: bars on a terminal, plain lines elsewhere; always stderr."""

from __future__ import annotations

import statistics
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from twinrun.benchmark import MeasuredLine
from twinrun.training import StepMetrics


class Display:
    """Progress of the points of one run."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True, emoji=False)
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
        self.console.print(text, markup=False)

    def begin(self, point: str, *, steps: int, status: str) -> None:
        """Show that `point` starts; called again when it starts over."""
        if point in self._tasks:
            self._progress.reset(self._task(point), total=steps, status=status)
        else:
            self._tasks[point] = self._progress.add_task(point, total=steps, status=status)
        self._line(f"{point}: {status}")

    def step(self, metrics: StepMetrics, *, steps: int) -> None:
        """Show one optimizer step."""
        status = f"loss {metrics.loss:.4f}  {metrics.seconds:.3f} s/step"
        self._progress.update(self._task(metrics.point), completed=metrics.step, status=status)
        if metrics.step in (1, steps) or metrics.step % max(1, steps // 8) == 0:
            self._line(f"{metrics.point}: step {metrics.step}/{steps}  {status}")

    def measured(self, line: MeasuredLine) -> None:
        """Show one measurement of a benchmark."""
        one = line.measurement
        times = [(timing, timing.milliseconds) for timing in (one.ours, one.baseline) if timing]
        told = [
            f"{timing.implementation} {statistics.median(spent):.4g} ms" if spent else "checked"
            for timing, spent in times
        ]
        status = f"{one.id}: {', '.join(told)}"
        self._progress.update(self._task(line.point), status=status)
        self._line(f"{line.point}: {status}")

    def end(self, point: str, *, status: str) -> None:
        """Show the result of `point`."""
        if point in self._tasks:
            self._progress.update(self._task(point), status=status)
        self._line(f"{point}: {status}")

    def _line(self, text: str) -> None:
        if not self.console.is_terminal:
            self.say(text)

    def _task(self, point: str) -> TaskID:
        return self._tasks[point]
