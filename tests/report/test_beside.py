"""What a run says for itself where every claim of its recipe needs several runs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.report.committed import PROJECT, changed, committed
from twinrun.report.tables import run_tables
from twinrun.report.words import headline
from twinrun.results.finished_run import run_of
from twinrun.results.record import Record


def newest(model: str, gpu: str) -> Record:
    """Return the newest record of a model on a GPU through Composer."""
    found = [
        one
        for one in committed("mpt-throughput")
        if one.gpu and one.gpu.id == gpu and one.description.subject.startswith(f"{model}, bf16, composer")
    ]
    return max(found, key=lambda one: one.created)


def printed(record: Record) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200, highlight=False).print(run_tables(run_of(record, PROJECT, folder=Path())))
    return stream.getvalue()


def test_a_run_says_what_it_reaches_where_no_claim_is_about_one_run() -> None:
    expected = (
        "On 1 x NVIDIA H200 SXM: mpt-1b, bf16, composer reaches 60.0% of the dense peak at devices=1."
        " No claim is about one run alone."
    )
    assert headline(newest("mpt-1b", "h200")) == expected


def test_published_rows_of_the_same_gpu_stand_beside_a_run() -> None:
    lines = printed(newest("mpt-7b", "h100-80gb")).splitlines()
    rows = [line.split() for line in lines if " x NVIDIA H100 80GB SXM" in line]
    # Published: 10,643 tokens/s on 8 GPUs, "8 x H100-80GB, 2023-10-20" of references.csv.
    assert [row[0] for row in rows] == ["2", "8", "128", "256", "512"]
    assert rows[1][-5:] == ["459.5", "46.4%", "10,643", "1.13", "1.13"]


def test_neighbours_stand_beside_a_run_whose_gpu_nobody_published() -> None:
    text = printed(newest("mpt-1b", "h200"))
    for neighbour in ("NVIDIA H100 80GB SXM", "NVIDIA A100 80GB SXM", "NVIDIA A100 40GB"):
        assert neighbour in text
    assert "This model was not published on an NVIDIA H200 SXM." in text
    assert "an MI250 trains MPT at 0.80 times the speed of an A100-40GB" in text


@pytest.mark.parametrize("reason", ["judged", "no GPU"])
def test_nothing_stands_beside_a_judged_run_or_one_on_a_processor(reason: str) -> None:
    record = newest("mpt-1b", "h200")
    other = committed("mpt7b-scaling")[0].verdicts if reason == "judged" else ()
    shown = changed(record, verdicts=other, gpu=record.gpu if reason == "judged" else None)
    assert "on one card, here and as published" not in printed(shown)
