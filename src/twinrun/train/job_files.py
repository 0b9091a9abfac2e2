"""The files between host and ranks: job in; lines of metrics and one result out. Imports without torch."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import load_json
from twinrun.protocol.allocation import RankReport
from twinrun.protocol.job import STOPPED_FILE, Job, Result, Stop
from twinrun.protocol.metrics_lines import forget
from twinrun.train.node import choose_interface, describe_node

AnyJob = TypeVar("AnyJob", bound=Job)


def read_job(kind: type[AnyJob]) -> AnyJob:
    """Return the job that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True, help="JSON file that describes the point")
    return load_json(parser.parse_args().job, kind)


def report_rank(job: Job) -> None:
    """Say which machine this rank runs on; the first of a node says what it is."""
    choose_interface()
    node = None if rank_variable("LOCAL_RANK", 0) else describe_node()
    report = RankReport(rank=rank_variable("RANK", 0), host=platform.node(), node=node)
    write_atomically(Path(job.out) / "ranks" / f"{report.rank}.json", report.model_dump_json() + "\n")


def append_line(job: Job, line: BaseModel) -> None:
    """Append a line to the job's metrics; for the first rank."""
    with Path(job.metrics).open("a", encoding="utf-8") as stream:
        stream.write(line.model_dump_json() + "\n")


def write_result(job: Job, result: Result) -> None:
    """Write the result of the job; for the first rank."""
    write_atomically(Path(job.out) / "result.json", result.model_dump_json(indent=1) + "\n")


def start_over(job: Job) -> None:
    """Take away what an earlier start of this attempt has said; for the first rank."""
    (Path(job.out) / STOPPED_FILE).unlink(missing_ok=True)
    forget(Path(job.metrics), job.point)


def write_stop(job: Job, step: int) -> None:
    """Say that all is saved up to `step`; for the first rank."""
    write_atomically(Path(job.out) / STOPPED_FILE, Stop(step=step).model_dump_json() + "\n")


def rank_variable(name: str, default: int) -> int:
    """Return what the launcher says of this rank, for example `LOCAL_RANK`."""
    return int(os.environ.get(name, default))
