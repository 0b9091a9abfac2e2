"""What is written after `invoke`: refused with 2 where it cannot be read, and help that starts nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from invoke.collection import Collection
from invoke.loader import FilesystemLoader

from tests.cli.test_bad_input import error_message
from tests.commands import ROOT, environment, invoke
from twinrun import __version__
from twinrun.cli.program import contexts

RECIPE = "recipes/mpt7b-scaling"


@pytest.mark.parametrize(
    "words",
    [["run", RECIPE, "-h"], ["run", RECIPE, "--help"], ["run", "-h"], ["run", "--help"], ["--help", "run"]],
    ids=" ".join,
)
def test_help_is_shown_and_nothing_started(words: list[str]) -> None:
    done = invoke(ROOT, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: invoke run RECIPE [--options]\n\nRun a published experiment")
    assert "  RECIPE  " in done.stdout
    assert "  -n, --dry  " in done.stdout
    assert "  --engine ENGINE  " in done.stdout


def test_no_words_show_the_commands() -> None:
    done = invoke(ROOT)
    assert done.returncode == 0
    assert "invoke COMMAND --help" in done.stdout
    assert "  checkpoint  " in done.stdout


@pytest.mark.parametrize("words", [["--help"], ["-h"]], ids=" ".join)
@pytest.mark.parametrize("inside", [True, False])
def test_help_lists_the_commands_anywhere(words: list[str], inside: bool, tmp_path: Path) -> None:
    done = program(*words, folder=ROOT if inside else tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "  checkpoint  " in done.stdout


def test_the_version_is_that_of_twinrun() -> None:
    assert program("--version").stdout == f"twinrun {__version__}\n"


def test_neither_a_removed_folder_nor_settings_of_invoke_end_with_a_traceback(tmp_path: Path) -> None:
    (tmp_path / ".invoke.yaml").write_text(": [", encoding="utf-8")
    assert error_message(program("peak", HOME=str(tmp_path)), 2).startswith("error: --gpu")
    gone = tmp_path / "gone"
    gone.mkdir()
    assert "no folder to work in" in error_message(
        program(folder=gone, first="import os; os.rmdir('../gone')"), 2
    )


def program(
    *words: str, folder: Path = ROOT, first: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the program that this distribution installs as `invoke`, after a statement of Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["invoke"].partition(":")
    code = "\n".join([first, f"from {module} import {function}", f"{function}()"])
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment(ROOT, **variables),
        check=False,
        timeout=100,
    )


def test_only_letters_of_habit() -> None:
    module, _ = FilesystemLoader(start=str(ROOT)).load("tasks")
    for one in contexts(Collection.from_module(module)):
        for argument in (argument for argument in one.args.values() if not argument.positional):
            names = one.names_for(f"--{argument.names[0]}")
            assert {name for name in names if name[1] != "-"} <= {"-n", "-o"}, names
            assert argument.help, names


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--config"], "config (f)> needed value"),
        (["-f"], "config (f)> needed value"),
        (["--list-depth=x"], "invalid literal for int()"),
        (["--config", "/dev/null", "recipes"], "invoke --config: this option does nothing here"),
        (["--search-root", "/", "recipes"], "no commands here"),
    ],
    ids=" ".join,
)
def test_options_before_the_command_end_with_2_too(words: list[str], part: str) -> None:
    assert part in error_message(program(*words), 2)
