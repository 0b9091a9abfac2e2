"""Commands of twinrun as processes of their own, in a project that may be a copy."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

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
    """Run a command in the project at `root`, in a fork of a process that has imported the package.

    The code is this project's: what a test changes of the copy's `src` needs `invoke_anew`.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = (Path(folder) / name for name in ("stdout", "stderr"))
        asked = {
            "arguments": arguments,
            "folder": str(root),
            "variables": environment(root, **(variables or {})),
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        server.stdin.write(f"{json.dumps(asked)}\n")
        server.stdin.flush()
        # Unlike select, it takes descriptors above 1,023.
        answers = select.poll()
        answers.register(server.stdout, select.POLLIN)
        if not answers.poll(PATIENCE_SECONDS * 1000):
            server.kill()
            raise TimeoutError(arguments)
        status = int(server.stdout.readline())
        texts = [path.read_text(encoding="utf-8") for path in (stdout, stderr)]
        return subprocess.CompletedProcess(arguments, status, *texts)


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("command_server.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


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
