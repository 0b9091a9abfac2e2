"""Being told to end: a rank goes on to the end of its step, where all ranks save together."""

from __future__ import annotations

import signal
from types import FrameType

_signals: list[int] = []


class TrainingStoppedError(Exception):
    """All ranks have saved what they did, and end."""

    def __init__(self, step: int) -> None:
        super().__init__(f"saved after step {step}")
        self.step = step


def listen() -> None:
    """Take SIGTERM, which schedulers send before they kill, as a request; for a run that can save."""
    signal.signal(signal.SIGTERM, _note)


def wanted() -> bool:
    """Say whether this rank was told to end."""
    return bool(_signals)


def _note(number: int, _frame: FrameType | None) -> None:
    _signals.append(number)
