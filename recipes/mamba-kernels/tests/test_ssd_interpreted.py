"""The tests of SSD in Triton's interpreter, where no GPU is: it is chosen when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
# Of transformers' models what runs SSD, and what Triton's interpreter does with NumPy.
MODELS = (
    *("-k", "mamba2 and training"),
    *("-W", "ignore:Conversion of an array:DeprecationWarning", "-W", "ignore::RuntimeWarning"),
)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_ssd_api.py", ()),
        pytest.param("test_ssd_numerics.py", ("-m", "not nightly"), marks=pytest.mark.nightly),
        pytest.param("test_ssd_numerics.py", ("-m", "nightly"), marks=pytest.mark.nightly),
        # Most of its time goes into importing transformers anew.
        pytest.param("test_transformers.py", MODELS, marks=pytest.mark.nightly),
    ],
)
def test_they_pass_in_the_interpreter(name: str, options: tuple[str, ...]) -> None:
    pytest_of = [sys.executable, "-m", "pytest", "--quiet", "--numprocesses=0", "-p", "no:cacheprovider"]
    command = [*pytest_of, str(Path(__file__).with_name(name)), *options]
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
