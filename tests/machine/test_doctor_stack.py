"""`invoke doctor --stack`, stopped by the user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_stop_says_which_checks_ended(root: Path) -> None:
    (root / "recipes").mkdir(exist_ok=True)
    checks = root / "images" / "stacks" / "plain" / "checks"
    checks.mkdir()
    (checks / "first.py").write_text("print('fine')\n", encoding="utf-8")
    (checks / "second.py").write_text("import time; time.sleep(60)\n", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "twinrun", "doctor", "--stack", "plain", "--engine", "host"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    told: list[str] = []
    while not told or told[-1] not in ("first: ok\n", ""):
        told.append(process.stderr.readline())
    assert told[-2:] == ["first: running, 3 of 4\n", "first: ok\n"]
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert "error: plain: stopped; checks that ended: files: ok, versions: ok, first: ok\nhint: " in error
