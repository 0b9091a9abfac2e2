"""`invoke doctor --stack`, stopped by the user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from twinrun.cli import stacks
from twinrun.foundation.errors import InputError

ROOT = Path(__file__).parents[2]
DOCTOR = """
import sys
from pathlib import Path
from twinrun.cli.stacks import doctor
from twinrun.cli.console import exit_on_error
with exit_on_error():
    doctor(Path(sys.argv[1]), as_json=False, stack="plain", engine="host")
"""


def test_a_stop_says_which_checks_ended(root: Path) -> None:
    checks = root / "images" / "stacks" / "plain" / "checks"
    checks.mkdir()
    (checks / "first.py").write_text("print('fine')\n", encoding="utf-8")
    (checks / "second.py").write_text("import time; time.sleep(60)\n", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-c", DOCTOR, str(root)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    told: list[str] = []
    while not told or told[-1] not in ("first: ok\n", ""):
        told.append(process.stdout.readline())
    assert told[-2:] == ["first: running, 3 of 4\n", "first: ok\n"]
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert "error: plain: stopped; checks that ended: files: ok, versions: ok, first: ok\nhint: " in error


def test_an_engine_without_a_stack_is_refused() -> None:
    with pytest.raises(InputError, match="only the checks of a stack have an engine"):
        stacks.doctor(ROOT, as_json=False, stack=None, engine="venv")
