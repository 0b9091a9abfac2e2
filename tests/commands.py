"""Commands of twinrun in a project that may be a copy, in this process or in one of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

from twinrun.cli.program import main

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 300


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
    """Run a command in the project at `root`, in this process.

    The code is this project's: what a test changes of the copy's `src` needs `invoke_anew`.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = [folder / name for name in ("stdout", "stderr")]
        out, err = (stack.enter_context(file.open("w", encoding="utf-8")) for file in files)
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(contextlib.chdir(root))
        stack.enter_context(patch.dict(os.environ, environment(root, **(variables or {}))))
        stack.enter_context(patch.object(sys, "argv", ["twinrun", *arguments]))
        stack.enter_context(_own_signals())
        status = main(arguments)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return subprocess.CompletedProcess(arguments, status, *(file.read_text("utf-8") for file in files))


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Leave to this process what it does at a signal: a command has handlers of its own until it ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def invoke_anew(
    root: Path, *arguments: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does: a new interpreter imports what it needs."""
    return subprocess.run(
        [sys.executable, "-m", "twinrun", *arguments],
        cwd=root,
        env=environment(root, **(variables or {})),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
