"""The lines of metrics.jsonl that belong to a point."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from twinrun.foundation.files import write_atomically
from twinrun.protocol.job import MetricsLine


def forget(metrics: Path, point: str) -> None:
    """Drop the lines of `point` and any torn line, so that a point which starts over counts once.

    It reads every line of the file: who knows that a point has none does not call it.
    """
    if not metrics.exists():
        return
    lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if _is_of_another(line, point)]
    if len(kept) < len(lines):
        write_atomically(metrics, "".join(f"{line}\n" for line in kept))


def _is_of_another(line: str, point: str) -> bool:
    try:
        return MetricsLine.model_validate_json(line).point != point
    except ValidationError:
        return False
