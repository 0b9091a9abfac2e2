"""The tests of SSD in Triton's interpreter, where no GPU is: it is chosen when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["test_ssd_api.py", "test_ssd_numerics.py"])
def test_they_pass_in_the_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "--quiet", "--numprocesses=0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, HERE / name],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
