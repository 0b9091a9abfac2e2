"""What is said while an environment is installed, and before."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from twinrun.execution.engine import Workspace
from twinrun.execution.engines import venv
from twinrun.execution.uv import Downloads, run_uv
from twinrun.foundation.errors import MachineError
from twinrun.manifests.locks import EnvironmentSize
from twinrun.manifests.stack import load_stack
from twinrun.manifests.vendor import load_vendors

ROOT = Path(__file__).resolve().parents[2]
# Printed by uv 0.13.9.
LINES = """\
Using Python 3.11.7 environment at: v
Resolved 6 packages in 854ms
Downloading pandas (12.5MiB)
Downloading numpy (15.6MiB)
Downloading scipy (39.3MiB)
 Downloaded numpy
 Downloaded pandas
 Downloaded scipy
Prepared 6 packages in 5.41s
Installed 6 packages in 247ms
 + numpy==2.1.3
"""


def test_downloads_are_counted_by_packages_and_bytes() -> None:
    downloads = Downloads()
    told = [str(downloads) for line in LINES.splitlines() if downloads.read(line)]
    assert told == [
        "[##........] 16 MiB of 67 MiB, 1 large package; on its way: scipy (39 MiB) and 1 more",
        "[####......] 28 MiB of 67 MiB, 2 large packages; on its way: scipy (39 MiB)",
        "[##########] 67 MiB of 67 MiB, 3 large packages",
    ]


def test_a_total_that_is_known_before_is_the_whole() -> None:
    downloads = Downloads(total_bytes=670 << 20)
    told = [line for line in LINES.splitlines() if downloads.read(line)]
    assert told == [" Downloaded scipy"]
    assert str(downloads) == "[#.........] 67 MiB of 670 MiB, 3 large packages"


def test_what_uv_says_at_its_end_is_kept_for_the_error(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(MachineError, match="the environment cannot be installed") as caught:
        run_uv("pip", "sync", str(tmp_path / "absent.lock"), say=said.append)
    assert "absent.lock" in str(caught.value.found)
    assert said == []


def test_another_file_than_the_locked_one_is_no_fault_of_the_network(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "toy-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in (
            ("METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n"),
            ("WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            wheel.writestr(f"toy-1.0.dist-info/{name}", text)
    lock = tmp_path / "requirements.lock"
    lock.write_text(f"toy==1.0 --hash=sha256:{'0' * 64}\n")
    line = ("pip", "sync", "--require-hashes", "--no-index", "--find-links", str(tmp_path), str(lock))
    said: list[str] = []
    with pytest.raises(MachineError, match="Hash mismatch") as caught:
        run_uv(*line, "--target", str(tmp_path / "made"), say=said.append)
    assert "not the one that was locked" in str(caught.value.hint)
    assert "network" not in str(caught.value.hint)


def test_uv_itself_tells_its_phases(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "empty.txt").write_text("")
    run_uv("venv", "--quiet", str(tmp_path / "made"), say=said.append)
    run_uv(
        "pip",
        "sync",
        "--python",
        str(tmp_path / "made" / "bin" / "python"),
        "--allow-empty-requirements",
        str(tmp_path / "empty.txt"),
        say=said.append,
    )
    assert all(line.startswith(("Resolved", "Prepared", "Installed")) for line in said)


def test_an_environment_that_the_disk_does_not_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path))
    loaded = load_stack(ROOT, "cpu")
    huge = EnvironmentSize(download_mib=1, disk_mib=1 << 40, source="none")
    loaded = loaded.model_copy(update={"stack": loaded.stack.model_copy(update={"environment": huge})})
    workspace = Workspace(root=ROOT, run=tmp_path / "run", data=tmp_path / "data")
    # So a run is refused before it has a folder.
    reason = venv.unusable(stack=loaded, vendor=load_vendors(ROOT)["cpu"])
    assert reason == "the disk has no room for the environment"
    with pytest.raises(MachineError, match="the disk has no room for the environment") as caught:
        venv.open_engine(stack=loaded, vendor=load_vendors(ROOT)["cpu"], workspace=workspace, say=pytest.fail)
    assert str(caught.value.place) == str(tmp_path / "environments")
    assert "TWINRUN_CACHE" in str(caught.value.hint)
