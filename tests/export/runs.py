"""A finished run of a training as it lies on the disk, with power."""

from __future__ import annotations

from pathlib import Path

from tests.records import training_record
from twinrun.report.page import write_report
from twinrun.results.judged import Judged
from twinrun.results.reading import FinishedRun
from twinrun.results.record import write_record

POINTS = {"nodes=1": 166.0, "nodes=2": 164.0}
WATTS = 250.0


def record_with_power() -> Judged:
    return training_record(POINTS, watts=WATTS)


def write_run(folder: Path, found: Judged) -> Path:
    """Write record and report; return the folder."""
    file = folder / "record.json"
    write_report(folder / "report.html", FinishedRun(record=found, folder=folder, file=file))
    write_record(file, found.record)
    return folder
