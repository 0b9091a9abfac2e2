"""What an owner of GPUs runs, on this machine with played probes, and the jobs of runners."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.machine.played import STAND_IN, described
from twinrun.manifests.stack import find_stacks

ROOT = Path(__file__).parents[2]


Played = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def played(tmp_path: Path) -> Played:
    """Run a module on this machine with the GPUs of another one."""

    def run(module: str, *arguments: str, model: str = "") -> subprocess.CompletedProcess[str]:
        ours = {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{STAND_IN}",
            "PLAYED_GPUS": described(model) if model else "{}",
            "TWINRUN_CACHE": str(tmp_path / "cache"),
            "DOCKER_HOST": f"unix://{tmp_path}/no.sock",
        }
        command = [sys.executable, "-m", module, *arguments]
        given: dict[str, Any] = {"cwd": ROOT, "env": os.environ | ours, "timeout": 600}
        return subprocess.run(command, capture_output=True, text=True, check=False, **given)

    return run


@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="this machine has GPUs")
def test_machine_without_gpus_is_told_what_is_missing(played: Played) -> None:
    done = played("tools.gpu")
    assert (done.returncode, done.stdout) == (3, "")
    assert "no GPU" in done.stderr
    assert "NVML: not on this machine" in done.stderr
    assert "hint: invoke doctor" in done.stderr


def test_listing_names_every_recipe_and_its_stack(played: Played) -> None:
    names = ("recipes/rmsnorm", "recipes/mamba-kernels", "recipes/none")
    done = played(
        "tools.gpu", "--dry", *(word for name in names for word in ("--recipe", name)), model="h200"
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == "recipes/rmsnorm: invoke run recipes/rmsnorm --scale node --json --yes"
    assert second.startswith("recipes/mamba-kernels: invoke run")
    assert third.startswith("recipes/none: left out: ")
    assert "none" in third


def test_file_to_send_is_whole_though_nothing_could_run(played: Played, tmp_path: Path) -> None:
    # The GPUs are played, and the interpreter of this test has no framework of theirs.
    out = tmp_path / "sent" / "gpu.zip"
    options = ("--recipe", "recipes/rmsnorm", "--engine", "host", "--out", str(out))
    done = played("tools.gpu", *options, model="h100-80gb")
    assert done.returncode != 0, done.stderr
    with zipfile.ZipFile(out) as archive:
        assert archive.namelist() == ["summary.json"]
        text = archive.read("summary.json").decode()
    doctor, _, check, run = json.loads(text)
    assert {one["name"] for one in doctor["printed"]["checks"]} >= {"GPUs (cuda)", "memory"}
    assert (check["exit_code"], run["exit_code"]) != (0, 0)
    assert run["said"]
    assert not re.search(rf"\b{re.escape(platform.node())}\b", text)
    assert str(tmp_path) not in text


def test_matrix_has_a_job_for_each_stack_and_architecture(played: Played) -> None:
    rows = json.loads(played("tools.matrix").stdout)["include"]
    stacks = {name: one.stack for name, one in find_stacks(ROOT).items()}
    assert {(row["stack"], row["arch"]) for row in rows} == {
        (name, arch) for name in {row["stack"] for row in rows} for arch in stacks[name].archs
    }
    assert {row["arch"] for row in rows} >= {"gfx90a", "gfx942", "gfx950", "sm_80", "sm_90"}
    assert all(stacks[row["stack"]].vendor == row["vendor"] for row in rows)
    chosen = json.loads(played("tools.matrix", "gfx950").stdout)["include"]
    assert [row["stack"] for row in chosen] == ["rocm7.1-torch2.10"]
    done = played("tools.matrix", "gfx90")
    assert done.returncode == 2
    assert "allowed: cuda, gfx90a, gfx942" in done.stderr
