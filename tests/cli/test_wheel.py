"""The wheel runs an experiment in an empty folder, and so do ReFrame and SkyPilot, read by themselves."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from uv import find_uv_bin

from tests.commands import ROOT, invoke

START = ROOT / "docs/guides/start"
UV = find_uv_bin()


@dataclass(frozen=True)
class InstalledWheel:
    """The program of the wheel, which finds its dependencies where the tests do."""

    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment in which the installed program stands before that of the tests."""
        programs = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        cache = str(self.folder.with_name("cache"))
        return os.environ | {"PYTHONPATH": str(self.folder), "PATH": programs, "TWINRUN_CACHE": cache}

    def run(self, *arguments: str, empty: Path, limit: int) -> subprocess.CompletedProcess[str]:
        """Run the program in an empty folder, for `limit` seconds at most."""
        return captured(
            (self.folder / "bin" / "twinrun", *arguments), cwd=empty, env=self.variables, limit=limit
        )


def captured(
    command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str], limit: int
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=env, text=True, capture_output=True, timeout=limit, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> InstalledWheel:
    """Return the wheel of this checkout, installed from the file."""
    folder = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder))
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (file,) = folder.glob("*.whl")
    options = ("--quiet", "--offline", "--no-deps", "--python", sys.executable)
    install = (UV, "pip", "install", *options, "--target", folder / "installed", file)
    subprocess.run(install, check=True, timeout=120)
    return InstalledWheel(folder / "installed")


def isolated(folder: Path, package: str) -> Path:
    """Return the programs of an environment that has a package and what it needs, alone."""
    subprocess.run((UV, "venv", "--quiet", "--python", sys.executable, folder), check=True, timeout=60)
    install = (UV, "pip", "install", "--quiet", "--python", folder / "bin/python", package)
    subprocess.run(install, check=True, timeout=600)
    return folder / "bin"


def test_the_wheel_plans_a_run_in_an_empty_folder(wheel: InstalledWheel, tmp_path: Path) -> None:
    options = ("--dry", "--vendor", "cpu", "--engine", "host")
    done = wheel.run("run", "mpt7b-scaling", *options, empty=tmp_path, limit=60)
    assert done.returncode == 0, done.stderr
    assert "Strong scaling of MPT-7B" in done.stdout
    # Nothing is of this checkout but the interpreter, whose environment may lie in it or beside it.
    assert f"{ROOT}/" not in done.stdout.replace(f"{sys.prefix}/", "")


@pytest.mark.nightly
@pytest.mark.needs("composer")
def test_the_wheel_runs_in_an_empty_folder(wheel: InstalledWheel, tmp_path: Path) -> None:
    options = ("--vendor", "cpu", "--engine", "host", "--scale", "smoke", "--json")
    done = wheel.run("run", "mpt7b-scaling", *options, empty=tmp_path, limit=900)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert {one["final"] for one in summary["verdicts"]} >= {"holds-here"}


@pytest.mark.nightly
@pytest.mark.needs("torch")
def test_reframe_runs_a_recipe_and_keeps_its_numbers(wheel: InstalledWheel, tmp_path: Path) -> None:
    program = isolated(tmp_path / "environment", "reframe-hpc==4.10.4") / "reframe"
    settings = ("recipe=cluster-acceptance", "scale=smoke", "engine=host", "options=--vendor cpu")
    done = captured(
        (
            *(program, "--prefix", tmp_path, "--checkpath", START / "reframe_recipes.py", "--run"),
            *(word for one in settings for word in ("--setvar", one)),
        ),
        cwd=tmp_path,
        env=wheel.variables | {"HOME": str(tmp_path)},
        limit=900,
    )
    assert done.returncode == 0, done.stdout
    assert "Ran 1/1 test case(s)" in done.stdout


@pytest.mark.nightly
def test_skypilot_reads_its_task(tmp_path: Path) -> None:
    program = isolated(tmp_path / "environment", "skypilot==0.14.1") / "python"
    read = f"sky.Task.from_yaml({str(START / 'skypilot.yaml')!r})"
    code = f"import sky; one = {read}; print(len(one.resources), one.num_nodes)"
    done = captured((program, "-c", code), cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)}, limit=300)
    assert done.stdout.splitlines()[-1:] == ["3 1"], done.stderr


def test_the_commands_of_the_task_are_plans() -> None:
    found = yaml.safe_load((START / "skypilot.yaml").read_text(encoding="utf-8"))
    lines = [shlex.split(line)[1:] for line in found["run"].splitlines() if "/twinrun " in line]
    assert [line[0] for line in lines] == ["doctor", "run"]
    words = [word.replace("$RECIPE", found["envs"]["RECIPE"]).replace("$SCALE", "smoke") for word in lines[1]]
    assert invoke(ROOT, *words, "--vendor", "cpu", "--dry").returncode == 0


def test_runs_of_a_wheel_go_to_the_working_folder_or_the_users_state(
    wheel: InstalledWheel, tmp_path: Path
) -> None:
    code = "from twinrun.foundation.cache import *; print(runs_folder(project_root()))"
    open_, closed, state = tmp_path / "open", tmp_path / "closed", tmp_path / "state"
    for folder, mode, expected in ((open_, 0o700, open_ / "runs"), (closed, 0o500, state / "twinrun/runs")):
        folder.mkdir(mode=mode)
        # Root may write everywhere: the answer of the system is asked for another user.
        denied = "import os; os.access = lambda place, mode: bool(os.stat(place).st_mode & 0o200)\n"
        env = wheel.variables | {"XDG_STATE_HOME": str(state)}
        done = captured((sys.executable, "-c", f"{denied}{code}"), cwd=folder, env=env, limit=60)
        assert done.stdout.strip() == str(expected), done.stderr


@pytest.mark.nightly
def test_invoke_of_an_environment_is_left_alone(wheel: InstalledWheel, tmp_path: Path) -> None:
    programs = isolated(tmp_path / "environment", "invoke")
    own = (programs / "invoke").read_bytes()
    (file,) = wheel.folder.parent.glob("*.whl")
    for words in (("install", "--no-deps", file), ("uninstall", "twinrun")):
        command = (UV, "pip", words[0], "--python", programs / "python", *words[1:])
        subprocess.run(command, check=True, timeout=300)
        assert (programs / "invoke").read_bytes() == own
        assert (programs / "twinrun").exists() == (words[0] == "install")
