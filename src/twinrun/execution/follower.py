"""Following what the ranks of one attempt append to the metrics of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from twinrun.protocol.job import MetricsLine


class Follower:
    """Shows the whole lines that one attempt appends to the metrics of a run."""

    def __init__(
        self, metrics: Path, *, attempt: str, show: Callable[[bytes], None], offset: int = 0
    ) -> None:
        """Follow `metrics` from a place in it on."""
        self._metrics = metrics
        self._attempt = attempt
        self._show = show
        self._offset = offset

    def follow(self) -> None:
        """Show the lines that have come since the last call."""
        if not self._metrics.exists():
            return
        # Ranks that a scheduler starts again drop what they wrote before.
        self._offset = min(self._offset, self._metrics.stat().st_size)
        with self._metrics.open("rb") as stream:
            stream.seek(self._offset)
            new = stream.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            # A process that outlived its attempt may still write.
            if _attempt_of(line) == self._attempt:
                self._show(line)


def _attempt_of(line: bytes) -> str | None:
    """Return the attempt that wrote a line of metrics, None for what is no such line."""
    try:
        return MetricsLine.model_validate_json(line).attempt
    except ValidationError:
        return None


def bytes_of(file: Path) -> int:
    """Return the bytes of a file, 0 where there is none."""
    return file.stat().st_size if file.exists() else 0
