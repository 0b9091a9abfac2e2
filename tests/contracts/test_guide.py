"""The walk of the guide, its commands word for word, on a clone of what is committed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.tree import ROOT

GUIDE = ROOT / "docs" / "guides" / "add-a-recipe.md"
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
WALK = ("## A kernel", "## A training")


def commands(section: str) -> list[list[str]]:
    """Return the commands of a section, but for the installation, which the environment of the tests is."""
    text = GUIDE.read_text(encoding="utf-8").partition(f"\n{section}")[2].partition("\n## ")[0]
    lines = [line for block in CONSOLE.findall(text) for line in block.splitlines()]
    assert lines, section
    return [shlex.split(line) for line in lines if not line.startswith("pip ")]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guide") / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


@pytest.mark.needs("composer")
@pytest.mark.parametrize("section", WALK)
def test_a_stranger_gets_through(clone: Path, section: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(clone / "src"), "COOKIECUTTER_CONFIG": os.devnull}
    programs = {"invoke": [sys.executable, "-m", "twinrun"], "cookiecutter": ["cookiecutter"]}
    for words in commands(section):
        # Installing the lock is another test's; the interpreter of the tests has what the ranks import.
        engine = ["--engine", "host"] if words[:2] == ["invoke", "run"] and "paper" not in words else []
        command = [*programs[words[0]], *words[1:], *engine]
        done = subprocess.run(
            command, cwd=clone, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    status = ["git", "status", "--short", "--untracked-files=normal"]
    added = subprocess.run(status, cwd=clone, capture_output=True, text=True, check=True).stdout
    assert not [line for line in added.splitlines() if not re.match(r"\?\? recipes/my-(norm|gpt)/", line)]
