"""Choices of launch options, and what is printed of them; that they run is Triton's to show."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
import torch
import tune_ssd
from twinrun_mamba.ssd import launch, launch_backward, tuning


@pytest.mark.parametrize("kernel", tuning.KERNELS)
def test_choices_begin_with_the_table_and_differ(kernel: str) -> None:
    row = tuning.options(kernel, arch="sm90", element_bytes=2)
    found = list(tune_ssd.choices(row))
    assert found[0] == row
    assert len(found) == len(set(found)) > 70
    assert {one.kernel for one in found} == {kernel}
    few = tune_ssd.spread(found, 10)
    assert few[0] == row
    assert len(few) <= 10


def test_a_choice_is_in_place_for_its_kernel_alone() -> None:
    inputs: Any = SimpleNamespace(x=torch.ones(1), tf32=False)
    row = tuning.options("chunk_outputs", arch="sm90", element_bytes=2)
    before = launch.options("chunk_states", inputs)
    with tune_ssd.in_place(row):
        for module in (vars(launch), vars(launch_backward)):
            assert module["options"]("chunk_outputs", inputs) == row
            assert module["options"]("chunk_states", inputs) == before
    assert vars(launch)["options"] is vars(launch_backward)["options"]
    assert launch.options("chunk_outputs", inputs).arch == "cpu"


def test_the_best_over_all_shapes_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timed(row: tuning.LaunchOptions, *_: Any) -> float | None:
        return None if row.num_stages == 4 else 100.0 / row.num_warps

    monkeypatch.setattr(tune_ssd, "run_of", lambda *_: list)
    monkeypatch.setattr(tune_ssd, "timed", timed)
    out = tmp_path / "times.csv"
    given = ["--device", "cpu", "--kernel", "chunk_outputs", "--out", str(out)]
    assert tune_ssd.main([*given, "--shape", "small", "--shape", "2.7b"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("0.50 of the table's time: chunk_outputs,cpu,3.3,4,ieee,")
    lines = out.read_text().splitlines()
    assert lines[0].endswith("matrix_instr_nonkdim,microseconds small,microseconds 2.7b")
    assert len(lines) == 1 + 1 + 3 * 3 * 3 * 2 * 3


def test_shapes_of_two_dtypes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        tune_ssd.main(["--device", "cpu", "--shape", "small", "--shape", "minimal"])
    assert stopped.value.code == 2
    assert "--shape: found bf16 and fp32, allowed shapes of one dtype" in capsys.readouterr().err
