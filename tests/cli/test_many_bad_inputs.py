"""Several hundred bad inputs over every command: each is refused as one, at once, and changes nothing."""

from __future__ import annotations

import resource
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.cli.bad_inputs import lines, places
from tests.cli.test_bad_input import files_of, with_manifests
from tests.commands import invoke

# Of the processor, which other work on the machine does not count; what waits for ever is ended.
BUSY_SECONDS, PATIENCE_SECONDS = 10, 100
MEMORY_BYTES = 6 << 30
# Wrong input, or right input that this machine cannot run.
REFUSED = (2, 3)


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    """Bound the time and the memory of what a test reads: some of it has no end."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.signal(signal.SIGALRM, handler)


def faults(folder: Path, every: int) -> list[str]:
    """Run each line, or one of `every`, and return what was not refused as it should be."""
    (folder / "files").mkdir()
    root, there = with_manifests(folder / "project"), places(folder / "files")
    found, before = [], files_of(root)
    for line in list(lines(there))[::every]:
        start = time.process_time()
        signal.alarm(PATIENCE_SECONDS)
        done = invoke(root, *line)
        signal.alarm(0)
        seconds = time.process_time() - start
        well_said = done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
        if done.returncode not in REFUSED or not well_said or done.stdout or seconds > BUSY_SECONDS:
            shown = [word[:60] for word in line]
            found.append(f"{shown}: {done.returncode} after {seconds:.0f} s: {done.stderr[-300:]}")
    assert files_of(root) == before
    assert stat.S_ISFIFO(Path(there["pipe"]).lstat().st_mode)
    assert stat.S_ISCHR(Path("/dev/null").lstat().st_mode)
    return found


def test_bad_inputs_are_refused(tmp_path: Path) -> None:
    found = faults(tmp_path, every=10)
    assert not found, "\n".join(["", *found])


@pytest.mark.nightly
def test_every_bad_input_is_refused(tmp_path: Path) -> None:
    assert len(list(lines(dict.fromkeys(("absent", "empty", "folder", "text", "loop"), "x")))) > 300
    found = faults(tmp_path, every=1)
    assert not found, "\n".join(["", *found])
