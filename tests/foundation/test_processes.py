"""Processes that twinrun starts end with it, however it ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from twinrun.foundation.processes import end_of, last_lines

PATIENCE_SECONDS = 10
PROGRAM = """
import pathlib, sys, time
from twinrun.foundation.processes import LocalProcess
folder = pathlib.Path(sys.argv[1])
started = LocalProcess(("sleep", "600"), variables={}, folder=folder, log=folder / "log")
print(started._process.pid, flush=True)
time.sleep(600)
"""


def test_what_was_started_ends_when_twinrun_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        started = Path("/proc") / killed.stdout.readline().strip()
        assert "sleep" in (started / "cmdline").read_text(encoding="utf-8")
        killed.kill()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while is_running(started):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: Path) -> bool:
    """Say whether a process has not ended; one that nobody waits for stays as a zombie."""
    try:
        return (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_message_takes_little_of_a_log_of_a_gigabyte(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stream:
        stream.seek(1 << 30)
        stream.write(b"\n".join([b"x" * (1 << 20)] * 3 + [b"the end without a newline"]))
    taken = end_of(log)
    assert len(taken) == 1 << 16
    assert last_lines(taken).endswith(" ...\n    the end without a newline")
    assert len(last_lines("\n".join(["y" * (1 << 20)] * 15))) < 10_000
    log.write_bytes(b"short")
    assert end_of(log) == "short"
