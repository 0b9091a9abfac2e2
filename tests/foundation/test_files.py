from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from filelock import Timeout

from twinrun.foundation.cache import locked
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import sha256_of_file, write_atomically, write_together

TOO_MUCH = "x" * 500_000


@contextlib.contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Let the kernel refuse files of more than `limit` bytes; needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_the_text_is_written_and_an_open_reader_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "record.json"
    write_atomically(path, "old")
    with path.open(encoding="utf-8") as reader:
        write_atomically(path, "größer\n")
        assert reader.read() == "old"
    assert path.read_bytes() == "größer\n".encode()
    assert [item.name for item in path.parent.iterdir()] == ["record.json"]


@pytest.mark.parametrize("text", [TOO_MUCH, "\udcff"], ids=["cut short", "cannot be encoded"])
def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    write_atomically(path, "old")
    with small_files(4096), pytest.raises((MachineError, UnicodeEncodeError)) as caught:
        write_atomically(path, text)
    if text == TOO_MUCH:
        assert "File too large" in str(caught.value)
        assert "not written: record.json; all other files are kept as they were" in str(caught.value)
    assert path.read_text(encoding="utf-8") == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["record.json"]


def test_files_that_belong_together_are_written_all_or_none(tmp_path: Path) -> None:
    first, second = tmp_path / "first.lock", tmp_path / "second.lock"
    write_together({first: "old", second: "older"})
    with small_files(4096), pytest.raises(MachineError, match=r"second\.lock: cannot write"):
        write_together({first: "new", second: TOO_MUCH})
    assert (first.read_text(encoding="utf-8"), second.read_text(encoding="utf-8")) == ("old", "older")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_a_file_is_as_open_as_the_user_says(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "record.json", "{}")
    finally:
        os.umask(before)
    assert (tmp_path / "record.json").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "link", "loop"])
def test_only_a_file_is_replaced(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with socket.socket(socket.AF_UNIX) as made:
        make: dict[str, Callable[[], object]] = {
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path),
            "socket": lambda: made.bind(str(path)),
            "link": lambda: path.symlink_to(tmp_path / "absent"),
            "loop": lambda: path.symlink_to(path),
        }
        make[kind]()
        before = path.lstat()
        with pytest.raises(InputError, match=r"record\.json: cannot be written here\n  found: a (?!file)"):
            write_atomically(path, "{}")
        assert path.lstat() == before
    assert [item.name for item in tmp_path.iterdir()] == ["record.json"]


def test_a_file_larger_than_one_read_is_digested_whole(tmp_path: Path) -> None:
    content = bytes(range(256)) * 8200
    (tmp_path / "large").write_bytes(content)
    assert sha256_of_file(tmp_path / "large") == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("text", ["'[' * 100_000", "b'{\"a\":' * 100_000"])
def test_brackets_in_brackets_end_no_process(text: str) -> None:
    program = (
        "import sys; from twinrun.foundation.files import parse_json\nsys.setrecursionlimit(1_000_000)\n"
        f"try: parse_json({text})\nexcept ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("recursion limit exceeded")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    # As such file systems let the kernel answer.
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    with (
        pytest.raises(MachineError, match="the file system has no locks") as caught,
        locked(tmp_path / "lock"),
    ):
        pytest.fail("held")
    assert (caught.value.place, caught.value.found) == (str(tmp_path), os.strerror(number))
    assert "TWINRUN_CACHE" in str(caught.value.hint)


def test_a_lock_that_is_held_is_waited_for(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"), pytest.raises(Timeout), locked(tmp_path / "lock", seconds=0):
        pytest.fail("held twice")
    with locked(tmp_path / "lock", seconds=0):
        busy = InputError("held")
        with pytest.raises(InputError, match="held"), locked(tmp_path / "lock", busy=busy):
            pytest.fail("held twice")
