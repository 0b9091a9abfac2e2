from __future__ import annotations

from pathlib import Path

from tests.report.committed import PROJECT, changed, newest
from twinrun.report.form import form, offer
from twinrun.results.finished_run import run_of

RECORD = newest("mpt7b-scaling")


def test_a_gpu_without_a_record_gets_a_form() -> None:
    other = changed(RECORD, gpu=PROJECT.gpus["mi250"])
    text = form(other)
    assert PROJECT.gpus["mi250"].name in text
    assert other.digest() in text
    assert "invoke report recipes/mpt7b-scaling --add submission.json" in text


def test_no_form_for_a_known_gpu_or_a_processor(tmp_path: Path) -> None:
    processor = changed(RECORD, gpu=None, machine=RECORD.machine.model_copy(update={"devices": ()}))
    for record in (RECORD, processor):
        assert offer(run_of(record, PROJECT, folder=tmp_path)) == ""
    assert not list(tmp_path.iterdir())
