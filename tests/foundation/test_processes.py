"""Processes that twinrun starts end with it, however it ends."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from twinrun.foundation.processes import end_of, last_lines, readable

PATIENCE_SECONDS = 10
PROGRAM = """
import pathlib, sys, time
from twinrun.foundation.processes import LocalProcess
folder = pathlib.Path(sys.argv[1])
started = LocalProcess(("sleep", "600"), variables={}, folder=folder, log=folder / "log")
print(started._process.pid, flush=True)
time.sleep(600)
"""
STOPPED_IN_A_FORK = """
import os, pathlib, signal, sys
from twinrun.foundation.processes import LocalProcess
folder = pathlib.Path(sys.argv[1])
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT))
try:
    LocalProcess(("sleep", "600"), variables={}, folder=folder, log=folder / "log")
except KeyboardInterrupt:
    print("stopped", pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
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


def test_a_stop_that_falls_into_a_fork_is_heard(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPPED_IN_A_FORK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert (done.stdout, done.stderr) == ("stopped []\n", "")


def is_running(process: Path) -> bool:
    """Say whether a process has not ended; one that nobody waits for stays as a zombie."""
    try:
        return (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_can_be_read_is_known_at_any_descriptor() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = 3000
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, high + 1), hard))
    reader, writer = os.pipe()
    try:
        fcntl.fcntl(reader, fcntl.F_DUPFD, high)
        assert not readable(high, seconds=0.01)
        os.write(writer, b"x")
        assert readable(high, seconds=PATIENCE_SECONDS)
        assert os.read(high, 1) == b"x"
    finally:
        os.close(writer)
    assert readable(high, seconds=PATIENCE_SECONDS)
    os.close(reader)
    os.close(high)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
