"""The sanitizers' runner, with a stand-in for the tool, which needs a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import sanitize

STAND_IN = """#!/bin/sh
tool=$2
while [ "$1" != --log-file ]; do shift; done
log=$2
shift 2
"""
RUN_GRID = '"$@" || exit $?\n'
GRID_PASSED = "echo 1 passed, 0 failed\n"
SUMMARIES = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
GRID = ("--only", "state_updates", "--device", "cpu", "--backend", "emulated-32")


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    tool = folder / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(STAND_IN + ending, encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")


def run(folder: Path, *grid: str) -> int:
    return sanitize.main(["--processes", "1", "--logs", str(folder / "logs"), *grid])


def test_both_tools_run_the_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = "\n".join(f"{tool}) echo '{summary}' >$log ;;" for tool, summary in SUMMARIES.items())
    stand_in(tmp_path, monkeypatch, f"{RUN_GRID}case $tool in\n{cases}\nesac\n")
    assert run(tmp_path, *GRID) == 0
    printed = capsys.readouterr().out
    for tool, summary in SUMMARIES.items():
        assert f"ok   {tool} 1/1: 1 passed, 0 failed, {summary.strip('= ')}" in printed
    assert printed.endswith("clean\n")


@pytest.mark.parametrize(
    ("ending", "grid", "said"),
    [
        (
            f"{GRID_PASSED}echo '========= ERROR SUMMARY: 1 error' >$log; exit 99",
            (),
            "1 passed, 0 failed, ERROR SUMMARY: 1 error",
        ),
        (f"{RUN_GRID}echo '{SUMMARIES['memcheck']}' >$log", ("--part", "none"), "exit code 2, no summary"),
        (GRID_PASSED, (), "1 passed, 0 failed, no summary"),
    ],
    ids=["found", "not started", "silent"],
)
def test_what_is_not_clean_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ending: str,
    grid: tuple[str, ...],
    said: str,
) -> None:
    stand_in(tmp_path, monkeypatch, ending + "\n")
    assert run(tmp_path, *grid) == 1
    printed = capsys.readouterr().out
    assert f"FAIL memcheck 1/1: {said}" in printed
    assert f"not clean: {tmp_path / 'logs'} says where" in printed


def test_an_earlier_run_is_no_witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, GRID_PASSED)
    logs = tmp_path / "logs"
    logs.mkdir()
    for tool, summary in SUMMARIES.items():
        (logs / f"{tool}-1.txt").write_text(summary, encoding="utf-8")
    assert run(tmp_path) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--processes", "0"), "--processes: found 0, allowed 1 or more; hint:"),
        (("--logs", __file__), f"--logs: found {__file__}, File exists; allowed: a folder"),
    ],
)
def test_wrong_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, str],
    said: str,
) -> None:
    stand_in(tmp_path, monkeypatch, "true\n")
    with pytest.raises(SystemExit, match="2"):
        sanitize.main(arguments)
    assert said in capsys.readouterr().err


def test_without_the_tool_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="2"):
        sanitize.main([])
    assert "compute-sanitizer: not on the PATH; hint:" in capsys.readouterr().err
