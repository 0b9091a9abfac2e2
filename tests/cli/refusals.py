"""Projects of commands that are refused, and the form that every refusal has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.commands import ROOT, invoke

RECIPE = "recipes/mpt7b-scaling"
# A port that the system keeps unused: whoever asks there is refused at once.
CLOSED = "http://127.0.0.1:9"


def copied_project(folder: Path) -> Path:
    """Return a copy of what commands read of the project, without records and earlier runs."""
    # Another worker may be writing its own bytecode.
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.json", "*.pyc.*"))
    return with_manifests(folder)


def with_manifests(folder: Path) -> Path:
    """Return `folder` with a copy of what commands read of the project but the package and the kernels."""
    for part in ("recipes", "images"):
        unwanted = shutil.ignore_patterns("*.json", "__pycache__", "tests", "csrc")
        shutil.copytree(ROOT / part, folder / part, ignore=unwanted)
    shutil.copy(ROOT / "tasks.py", folder)
    return folder


def files_of(root: Path) -> dict[str, int]:
    """Return every file and folder below `root` with the time of its last change."""
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*")}


def error_message(done: subprocess.CompletedProcess[str], code: int) -> str:
    """Return the message of a command that ended with `code`, after checking its form."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    _, start, message = f"\n{done.stderr}".partition("\nerror: ")
    assert start, done.stderr
    assert "\nerror: " not in message
    return re.sub(r"\s+", " ", f"error: {message}")


def refused(root: Path, *arguments: str, code: int = 2) -> str:
    """Run a command that must change no file, and return its message."""
    before = files_of(root)
    message = error_message(invoke(root, *arguments), code)
    assert files_of(root) == before
    return message


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
