"""What an owner of GPUs runs, on this machine with played probes, and the jobs of runners."""

from __future__ import annotations

import json
import os
import platform
import re
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.machine.answers import answering
from tools.gpu import MINUTES
from tools.steps import Step, perform
from twinrun.manifests.stack import find_stacks

ROOT = Path(__file__).parents[2]


class PlayedMachine:
    """This machine with programs that print what those of another one did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()

    def has(self, answer: str) -> None:
        program = self.folder / "bin" / answer.split(".")[1]
        program.write_text(f"#!/bin/sh\n{answering(answer)}\n", encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def run(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        ours = {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "TWINRUN_CACHE": str(self.folder / "cache"),
            "DOCKER_HOST": f"unix://{self.folder}/no.sock",
        }
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=os.environ | ours, capture_output=True, text=True, check=False, timeout=120
        )


@pytest.fixture
def played(tmp_path: Path) -> PlayedMachine:
    return PlayedMachine(tmp_path)


@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="this machine has GPUs")
def test_machine_without_gpus_is_told_what_is_missing(played: PlayedMachine) -> None:
    done = played.run("tools.gpu")
    assert (done.returncode, done.stdout) == (3, "")
    assert "no GPU" in done.stderr
    assert "amd-smi" in done.stderr
    assert "hint: run `invoke doctor`" in done.stderr


@pytest.mark.parametrize(
    ("answer", "machine", "stack"),
    [
        ("mi250.amd-smi.json", "8 x ", "rocm6.3-torch2.7"),
        ("mi355x.amd-smi.json", "8 x AMD Instinct MI355X", "rocm7.1-torch2.10"),
    ],
)
def test_listing_names_every_recipe_once(
    played: PlayedMachine, answer: str, machine: str, stack: str
) -> None:
    played.has(answer)
    done = played.run("tools.gpu", "--dry")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert machine in lines[0]
    # The README promises that one stack is installed.
    assert set(re.findall(r"--stack (\S+)", done.stdout)) == {stack}
    assert "runs without one, by their limits" in done.stdout
    told = "\n".join(line for line in lines if "invoke run" in line or line.startswith("left out"))
    for recipe in sorted(path.parent.name for path in ROOT.glob("recipes/*/recipe.toml")):
        assert told.count(f"recipes/{recipe}") == 1, recipe
    assert f"at most {MINUTES} min" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--engine", "venf"), "did you mean `venv`?"),
        (("--stack", "rocm6.3"), "rocm6.3"),
        (("--minutes", "nan"), "--minutes"),
        (("--minutes", "0"), "--minutes"),
        (("--recipe", "recipes/mpt7b"), "recipes/mpt7b"),
    ],
)
def test_wrong_option_is_refused_before_anything_runs(
    played: PlayedMachine, arguments: tuple[str, ...], said: str
) -> None:
    played.has("mi300x.amd-smi.json")
    done = played.run("tools.gpu", *arguments)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_file_to_send_is_whole_though_nothing_could_run(played: PlayedMachine, tmp_path: Path) -> None:
    # The GPUs are played, and the interpreter of this test has no framework of theirs.
    played.has("mi300x.amd-smi.json")
    out = tmp_path / "sent" / "gpu.zip"
    options = ("--recipe", "recipes/cluster-acceptance", "--engine", "pyxis", "--out", str(out))
    done = played.run("tools.gpu", *options)
    assert done.returncode == 4, done.stderr
    with zipfile.ZipFile(out) as archive:
        assert archive.namelist() == ["not-sent.json", "summary.json"]
        text = archive.read("summary.json").decode()
    summary = json.loads(text)
    assert list(summary["gpus"].values()) == [8]
    doctor, check, *runs = summary["steps"]
    assert {one["name"] for one in doctor["printed"]["checks"]} >= {"GPUs (rocm)", "memory"}
    # What could not be provisioned once is not tried for every recipe.
    assert (check["exit_code"] in (2, 3), runs) == (True, [])
    assert check["said"]
    assert platform.node() not in text
    assert str(tmp_path) not in text


def test_step_over_its_time_is_stopped(tmp_path: Path) -> None:
    began = time.monotonic()
    result = perform(Step(name="doctor", command=("doctor",), minutes=0.002), root=ROOT)
    assert result.timed_out
    assert not result.usual
    assert time.monotonic() - began < 30


def test_matrix_has_a_job_for_each_stack_and_architecture(played: PlayedMachine) -> None:
    rows = json.loads(played.run("tools.matrix").stdout)["include"]
    stacks = {name: one.stack for name, one in find_stacks(ROOT).items()}
    assert {(row["stack"], row["arch"]) for row in rows} == {
        (name, arch) for name in {row["stack"] for row in rows} for arch in stacks[name].archs
    }
    assert {row["arch"] for row in rows} >= {"gfx90a", "gfx942", "gfx950", "sm_80", "sm_90"}
    assert all(stacks[row["stack"]].vendor == row["vendor"] for row in rows)
    chosen = json.loads(played.run("tools.matrix", "gfx950").stdout)["include"]
    assert [row["stack"] for row in chosen] == ["rocm7.1-torch2.10"]


def test_matrix_refuses_a_label_that_no_stack_has(played: PlayedMachine) -> None:
    done = played.run("tools.matrix", "gfx90")
    assert done.returncode == 2
    assert "allowed: cuda, gfx90a, gfx942" in done.stderr
