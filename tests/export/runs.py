"""A finished run of a training as it lies on the disk, with power."""

from __future__ import annotations

from pathlib import Path

from tests.records import LOSSES, PROJECT, replaced, training_record, with_derived
from twinrun.foundation.files import sha256_of_file
from twinrun.protocol.measurements import sampled
from twinrun.protocol.training import StepMetrics
from twinrun.report.page import write_report
from twinrun.results.finished_run import run_of
from twinrun.results.record import Record, write_record

POINTS = {"nodes=1": 166.0, "nodes=2": 164.0}
WATTS = 250.0


def record_with_power() -> Record:
    record = training_record(POINTS)
    for point in record.points:
        power = sampled("power", [WATTS], metric="power", unit="W", per="device")
        kept = tuple(one for one in point.measurements if one.id in ("step-time", "peak-memory"))
        known = point.model_copy(update={"measurements": (*kept, power)})
        record = replaced(record, point.id, **dict(with_derived(known, record.plan, record.gpu)))
    return record.with_digest()


def write_run(folder: Path, record: Record) -> Path:
    """Write record, report, and a line for each step, the first without power; return the folder."""
    write_report(folder / "report.html", run_of(record, PROJECT, folder=folder))
    with (folder / "metrics.jsonl").open("w") as stream:
        for point in record.points:
            step_time = point.measurement("step-time")
            assert step_time
            for step, loss in enumerate(LOSSES, start=1):
                line = StepMetrics(
                    point=point.id,
                    attempt="0",
                    step=step,
                    loss=loss,
                    seconds=step_time.median,
                    timed=step > 2,
                    watts=None if step == 1 else WATTS,
                )
                stream.write(line.model_dump_json() + "\n")
        stream.write('{"point": "nodes=')
    files = {"metrics.jsonl": sha256_of_file(folder / "metrics.jsonl")}
    write_record(folder / "record.json", record.model_copy(update={"files": files}).with_digest())
    return folder
