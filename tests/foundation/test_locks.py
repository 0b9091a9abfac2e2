"""File systems that refuse locks: named, with what helps, and never a fault of twinrun."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from filelock import Timeout

from twinrun.foundation.cache import locked
from twinrun.foundation.errors import InputError, MachineError


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
