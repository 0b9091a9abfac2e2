"""Commands of twinrun as processes of their own, in a project that may be a copy."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.forks import PATIENCE_SECONDS, Forked, ForkServer

ROOT = Path(__file__).resolve().parents[1]


def environment(root: Path, **variables: str) -> dict[str, str]:
    """Return the variables of a command in the project at `root`; its engines and cache are its own."""
    package = root / "src" if (root / "src").is_dir() else ROOT / "src"
    ours = {
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TWINRUN_CACHE": str(root.parent / "cache"),
        "DOCKER_HOST": f"unix://{root.parent}/no.sock",
    }
    return os.environ | ours | variables


def invoke(
    root: Path, *arguments: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in the project at `root`, in a fork of a process that has imported the package.

    The code is this project's: what a test changes of the copy's `src` needs `invoke_anew`.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        asked = Forked(
            arguments=arguments,
            folder=str(root),
            variables=environment(root, **(variables or {})),
            stdout=str(files[0]),
            stderr=str(files[1]),
        )
        status = _server().run([asked])
        return subprocess.CompletedProcess(arguments, status, *(file.read_text("utf-8") for file in files))


@functools.cache
def _server() -> ForkServer:
    return ForkServer("tests.command_server", variables=os.environ | {"PYTHONPATH": str(ROOT / "src")})


def invoke_anew(
    root: Path, *arguments: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does: a new interpreter imports what it needs."""
    return subprocess.run(
        [sys.executable, "-m", "invoke", *arguments],
        cwd=root,
        env=environment(root, **(variables or {})),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
