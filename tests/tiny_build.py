"""The small stack built for real, by the command and by an engine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tests.tiny_stack import STACK, Checkout
from twinrun.manifests.stack import expected_stamps, load_manifest

SECONDS = 900


def another(checkout: Checkout, root: Path, *, instead: tuple[str, str] | None = None) -> Checkout:
    """Return a copy of the checkout, in which the Dockerfile may have one text instead of another."""
    # `runs` is also a package of src.
    shutil.copytree(
        checkout.root, root, ignore=lambda folder, _: ["runs"] if Path(folder) == checkout.root else []
    )
    dockerfile = root / "images/Dockerfile"
    if instead:
        text = dockerfile.read_text(encoding="utf-8")
        assert instead[0] in text
        dockerfile.write_text(text.replace(*instead), encoding="utf-8")
    return checkout._replace(root=root)


def relock(root: Path) -> None:
    """Give the locks of the small stack the stamps of what stack.toml says now."""
    folder = root / "images/stacks" / STACK
    for path, stamp in expected_stamps(folder, load_manifest(root, STACK)).items():
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("\n".join([stamp, *lines[1:], ""]), encoding="utf-8")


def arguments(checkout: Checkout, *options: str) -> list[str]:
    """Return the words that build the small stack of a checkout."""
    return ["build", "--stack", STACK, "--wheelhouse", str(checkout.wheelhouse), *options]


def environment(checkout: Checkout, **variables: str) -> dict[str, str]:
    """Return the variables that the command runs with: the checkout's own source and a cache of its own."""
    own = {"PYTHONPATH": str(checkout.root / "src"), "TWINRUN_CACHE": str(checkout.root.parent / "cache")}
    return os.environ | own | variables


def run(
    checkout: Checkout, *words: str, wrap: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of twinrun in a checkout."""
    command, variables = [*wrap, sys.executable, "-m", "twinrun", *words], environment(checkout, **variables)
    given: dict[str, Any] = {"cwd": checkout.root, "env": variables, "timeout": SECONDS}
    return subprocess.run(command, capture_output=True, text=True, check=False, **given)


@contextlib.contextmanager
def started(
    checkout: Checkout, step: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Start the build of a checkout, and yield it with what it says once it says a step."""
    command = [sys.executable, "-m", "twinrun", *arguments(checkout)]
    given: dict[str, Any] = {"cwd": checkout.root, "env": environment(checkout, **variables)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **given) as running:
        assert running.stderr is not None
        assert any(step in line for line in running.stderr)
        yield running, running.stderr


def build(
    checkout: Checkout, *options: str, wrap: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `invoke build` on the small stack of a checkout."""
    return run(checkout, *arguments(checkout, *options), wrap=wrap, **variables)


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what a command printed that went well."""
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed
