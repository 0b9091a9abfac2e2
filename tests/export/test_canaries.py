"""Credentials that a run met: none of them is in what it leaves for others, whatever form that has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.export.runs import record_with_power, write_run
from tests.records import replaced
from twinrun.export.check_files import write_check_files
from twinrun.export.ro_crate import write_crate
from twinrun.export.tracked_run import tracked_run
from twinrun.export.trackers import choose_trackers
from twinrun.foundation.errors import InputError
from twinrun.protocol.job import Job, Result
from twinrun.protocol.measurements import Check
from twinrun.report.page import write_report
from twinrun.results.reading import FinishedRun
from twinrun.results.submission import write_submission
from twinrun.train import rank

CANARIES = ("hf_canary0123456", "canary-pw", "canary-aws", "canary-bearer")
LEAK = (
    "HF_TOKEN=hf_canary0123456 https://bob:canary-pw@example.org/x AWS_SECRET=canary-aws"
    " Authorization: Bearer canary-bearer"
)


@pytest.fixture
def leaking(tmp_path: Path) -> FinishedRun:
    """A run whose checks and facts have credentials in them, as of a program that does not hide them."""
    record = record_with_power()
    check = Check(id="a-check", outcome="fail", place="a", nodes=("a",), reason=LEAK, remedy=LEAK, seconds=1)
    first, *rest = record.points
    record = replaced(record, first.id, data_server=LEAK)
    first = dataclasses.replace(record.points[0], checks=(check,))
    record = dataclasses.replace(record, points=(first, *rest))
    folder = tmp_path / "run"
    folder.mkdir()
    write_run(folder, record)
    return FinishedRun(record=record, folder=folder, file=folder / "record.json")


def track(name: str) -> Callable[[FinishedRun, Path], object]:
    def write(run: FinishedRun, out: Path) -> None:
        pytest.importorskip(name)
        choose_trackers(name)[name](out, tracked_run(run))

    return write


def node(run: FinishedRun, out: Path) -> None:
    """Write what ranks leave beside the points of a run."""
    (out / "ranks").mkdir(parents=True)
    told = {"out": str(out), "metrics": str(out / "metrics.jsonl"), "attempt": "1"}
    job = Job.model_validate({"recipe": "a", "point": "a", "world_size": 1, "accelerator": False} | told)
    rank.write_result(job, Result(point="a", device_name=LEAK, libraries={"a": LEAK}))


EXPORTS: dict[str, Callable[[FinishedRun, Path], object]] = {
    "page": lambda run, out: write_report(out / "report.html", run),
    "checks": lambda run, out: write_check_files(dataclasses.replace(run, folder=out)),
    "crate": lambda run, out: write_crate(out / "crate", run),
    "submission": lambda run, out: write_submission(out / "submission.json", run.record, run.file),
    "ranks": node,
    **{name: track(name) for name in ("tensorboard", "mlflow", "wandb")},
}
# A sealed record is sent as it is, or not at all.
REFUSED = ("crate", "mlflow")


@pytest.mark.parametrize("name", EXPORTS)
def test_no_credential_leaves(leaking: FinishedRun, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if name in REFUSED:
        with pytest.raises(InputError, match="looks like a password"):
            EXPORTS[name](leaking, out)
    else:
        EXPORTS[name](leaking, out)
        assert [file for file in out.rglob("*") if file.is_file()]
    for file in out.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        assert not [canary for canary in CANARIES if canary.encode() in content], file
