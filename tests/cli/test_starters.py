"""A class of ReFrame and a task of SkyPilot that start a recipe, read by the packages themselves."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from invoke.collection import Collection
from uv import find_uv_bin

import tasks
from tests.commands import ROOT
from twinrun.cli.program import contexts, refuse_options

START = ROOT / "docs/guides/start"
TASK = START / "skypilot.yaml"


def isolated(folder: Path, package: str) -> Path:
    """Return the programs of an environment that has a package and what it needs, alone."""
    uv = find_uv_bin()
    subprocess.run((uv, "venv", "--quiet", "--python", sys.executable, folder), check=True, timeout=60)
    install = (uv, "pip", "install", "--quiet", "--python", folder / "bin/python", package)
    subprocess.run(install, check=True, timeout=600)
    return folder / "bin"


def test_the_commands_of_the_task_exist() -> None:
    found = yaml.safe_load(TASK.read_text(encoding="utf-8"))
    assert (ROOT / "recipes" / found["envs"]["RECIPE"] / "recipe.toml").is_file()
    known = {context.name: context for context in contexts(Collection.from_module(tasks))}
    lines = [shlex.split(line)[1:] for line in found["run"].splitlines() if "/invoke " in line]
    assert {line[0] for line in lines} == {"doctor", "run"}
    for name, *words in lines:
        refuse_options(known[name], words)


@pytest.mark.nightly
def test_skypilot_reads_its_task(tmp_path: Path) -> None:
    programs = isolated(tmp_path / "environment", "skypilot==0.14.1")
    code = f"import sky; t = sky.Task.from_yaml({str(TASK)!r}); print(len(t.resources), t.num_nodes)"
    done = subprocess.run(
        (programs / "python", "-c", code),
        env=os.environ | {"HOME": str(tmp_path)},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["3 1"], done.stderr


@pytest.mark.nightly
@pytest.mark.needs("torch")
def test_reframe_runs_a_recipe_and_keeps_its_numbers(tmp_path: Path) -> None:
    programs = isolated(tmp_path / "environment", "reframe-hpc==4.10.4")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    settings = (f"recipe={ROOT / 'recipes/cluster-acceptance'}", "scale=smoke", "engine=host")
    done = subprocess.run(
        (
            *(
                programs / "reframe",
                "--prefix",
                tmp_path,
                "--checkpath",
                START / "reframe_recipes.py",
                "--run",
            ),
            *(word for one in settings for word in ("--setvar", one)),
        ),
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path), "PATH": path},
        text=True,
        capture_output=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "Ran 1/1 test case(s)" in done.stdout
