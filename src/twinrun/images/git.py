"""git, run without a terminal: it asks no question and prints English."""

from __future__ import annotations

from pathlib import Path

from twinrun.foundation.processes import read_output

_VARIABLES = {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -oBatchMode=yes", "LC_ALL": "C"}


def git(folder: Path, *arguments: str, seconds: float) -> str:
    """Run git in `folder` and return its standard output; raises RunError."""
    return read_output(["git", *arguments], variables=_VARIABLES, folder=folder, seconds=seconds)
