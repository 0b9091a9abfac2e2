"""The comparison of SSD: with the reference in upstream's place, from sources that look like upstream's."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import compare_upstream_ssd
import pytest

SMALL = ("--device", "cpu", "--backend", "reference", "--only", "tiny", "--repeats", "2", "--bitwise", "3")
# What upstream's package does: importing it whole needs extensions that were compiled.
WHOLE = '__version__ = "2.3.2.post1"\n\nimport selective_scan_cuda\n'
FUNCTION = """
from twinrun_mamba import mamba_chunk_scan_combined as ours

def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, **options):
    return ours(x, dt, A, B, C, chunk_size, **options, backend="reference")
"""


@pytest.fixture
def sdist(tmp_path: Path) -> Iterator[Path]:
    """Return an archive with the layout of upstream's; its modules are forgotten afterwards."""
    package = tmp_path / "mamba_ssm-2.3.2.post1" / "mamba_ssm"
    triton = package / "ops" / "triton"
    triton.mkdir(parents=True)
    (package / "__init__.py").write_text(WHOLE)
    for folder in (triton, triton.parent):
        (folder / "__init__.py").touch()
    (triton / "ssd_combined.py").write_text(FUNCTION)
    path = tmp_path / "mamba_ssm-2.3.2.post1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(package.parent, arcname=package.parent.name)
    before = {name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"}
    yield path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
        if name not in before:
            del sys.modules[name]


@pytest.mark.parametrize(("least", "status"), [("0", 0), ("1e9", 1)])
def test_a_row_has_errors_bits_and_times(
    least: str, status: int, sdist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    given = [*SMALL, "--source", str(sdist), "--out", str(out), "--least", least]
    assert compare_upstream_ssd.main(given) == status
    found = json.loads(out.read_text())
    assert found["upstream"] == "mamba_ssm 2.3.2.post1"
    (row,) = found["rows"]
    assert row["equal_passes"] == {"ours": 3, "upstream": 3}
    for name in ("ours", "upstream"):
        assert set(row["relative_error"][name]["backward"]) == {"x", "dt", "A", "B", "C", "D", "dt_bias"}
        assert all(value < 1e-5 for of in row["relative_error"][name].values() for value in of.values())
    for phase in ("forward", "backward"):
        times = row["milliseconds"][phase]
        assert row["ratio"][phase] == times["upstream"]["median"] / times["ours"]["median"] > 0
    printed = capsys.readouterr().out
    assert printed.startswith("tiny ")
    assert printed.endswith("ours repeats bit for bit in 1 of 1 rows\n")


# A process of its own imports torch anew.
@pytest.mark.nightly
def test_a_folder_and_rows_that_compile_side_by_side(sdist: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(sdist.parent / "mamba_ssm-2.3.2.post1")
    assert compare_upstream_ssd.main([*SMALL, "--source", folder, "--jobs", "1", "--least", "0"]) == 0
    assert "compiled tiny: exit code 0" in capfd.readouterr().out


def test_gated_rows_alone_have_z() -> None:
    import torch

    for gated in (False, True):
        shape = compare_upstream_ssd.SsdShape(
            name="", batch=1, length=3, heads=2, head_size=4, states=4, chunk=16, dtype="fp32", gated=gated
        )
        compared = compare_upstream_ssd.Compared(shape, torch.device("cpu"), 0)
        assert ("z" in compared.inputs) is gated


def test_what_cannot_start_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "mamba_ssm.tar.gz"
    broken.write_bytes(b"no archive")
    for arguments, said in (
        (["--only", "nothing"], "--only: found 'nothing', allowed small, nemotronh-56b"),
        (["--repeats", "0"], "--repeats: found 0, allowed 1 or more"),
        (["--source", str(tmp_path)], "found no mamba_ssm/ops/triton/ssd_combined.py"),
        (["--source", str(broken)], "cannot be imported"),
        (["--source", str(tmp_path / "absent")], "cannot be imported"),
    ):
        with pytest.raises(SystemExit) as stopped:
            compare_upstream_ssd.main([*SMALL, *arguments])
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err
