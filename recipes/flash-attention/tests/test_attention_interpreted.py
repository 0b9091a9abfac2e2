"""The tests of the functions and of their numbers in Triton's interpreter, where no GPU is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "name", ["test_attention_api.py", pytest.param("test_attention_numerics.py", marks=pytest.mark.nightly)]
)
def test_they_pass_in_the_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "--quiet", "--numprocesses=0", "-p", "no:cacheprovider"]
    command.append(str(Path(__file__).with_name(name)))
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
