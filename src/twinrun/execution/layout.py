"""Where in a run folder the files of a point are."""

from __future__ import annotations

from pathlib import Path

from twinrun.protocol.job import STOPPED_FILE


def point_folder(run: Path, point: str) -> Path:
    """Return the folder that the ranks of `point` write to."""
    return run / "points" / point


def job_file(run: Path, point: str) -> Path:
    """Return the file that tells the ranks of `point` what to do."""
    return point_folder(run, point) / "job.json"


def stop_file(run: Path, point: str) -> Path:
    """Return the file in which the ranks of `point` say that they were told to end, and have saved."""
    return point_folder(run, point) / STOPPED_FILE


def log_folder(run: Path, point: str) -> Path:
    """Return the folder for the logs of the launcher and the ranks of `point`."""
    return run / "log" / point
