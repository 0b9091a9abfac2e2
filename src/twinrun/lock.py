"""Locks: every Python package of a stack with its hashes, resolved by uv; they name no index."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import tempfile
from pathlib import Path

from uv import find_uv_bin

from twinrun.errors import InputError, MachineError, closest
from twinrun.files import write_atomically
from twinrun.manifest import Frozen, load_toml
from twinrun.process import last_lines
from twinrun.stack import Stack, normalise, pins, stamp

_ENTRY = re.compile(r"^(?=[A-Za-z0-9])", re.MULTILINE)


class LockChange(Frozen):
    """What resolving a stack again changed or would change."""

    stack: str
    changes: dict[str, str]
    """Package to `old -> new`; `absent` where one side has none."""
    stale: bool
    """The committed lock was not made from the committed requirements."""


def lock_names(root: Path, only: str | None) -> list[str]:
    """Return the stacks to lock: the one asked for, or all; raises InputError."""
    known = sorted(path.parent.name for path in (root / "images" / "stacks").glob("*/stack.toml"))
    if only is not None and only not in known:
        raise InputError(
            "unknown stack", place="--stack", found=only, allowed=known, hint=closest(only, known)
        )
    return [only] if only else known


def refresh(
    root: Path, name: str, *, index: str | None = None, upgrade: bool = False, check: bool = False
) -> LockChange:
    """Resolve the requirements of stack `name`, and write the lock unless `check`.

    Args:
        index: a further package index, for wheels that only the framework's own index carries;
            without it such pins stay out of the lock, and stack.toml names them as unverified.
        upgrade: let every package move that the requirements do not pin.

    Raises:
        MachineError: the packages cannot be resolved; the old lock stays as it was.
    """
    folder = root / "images" / "stacks" / name
    stack = load_toml(folder / "stack.toml", Stack)
    requirements, lock = folder / "requirements.in", folder / "requirements.lock"
    text = f"{stamp(requirements)}\n{_resolve(folder, stack, index=index, upgrade=upgrade)}"
    old = lock.read_text(encoding="utf-8") if lock.is_file() else ""
    before, after = pins(old), pins(text)
    if not check:
        write_atomically(lock, text)
    names = sorted({*before, *after})
    changes = {
        package: " -> ".join(" or ".join(side.get(package, ("absent",))) for side in (before, after))
        for package in names
        if before.get(package) != after.get(package)
    }
    return LockChange(stack=name, changes=changes, stale=not old.startswith(stamp(requirements)))


def _resolve(folder: Path, stack: Stack, *, index: str | None, upgrade: bool) -> str:
    requirements = (folder / "requirements.in").read_text(encoding="utf-8")
    options = ["--python-version", _lowest(stack.python)]
    if index:
        requirements = _with_local_versions(requirements, stack)
        options += ["--index", index, "--index-strategy", "unsafe-best-match"]
    lock = folder / "requirements.lock"
    known = lock.read_text(encoding="utf-8") if lock.is_file() and not upgrade else ""
    text = _compile(requirements, options, known=known)
    return text if index else _without(text, stack.replaces)


def _with_local_versions(requirements: str, stack: Stack) -> str:
    """Replace each requirement by the unverified pin of the same package."""
    exact = {normalise(pin.package()): pin.requirement for pin in stack.unverified}
    lines = []
    for line in requirements.splitlines():
        name = normalise(re.split(r"[=<>~! ;#]", line, maxsplit=1)[0])
        lines.append(exact.pop(name, line))
    return "\n".join([*lines, *exact.values(), ""])


def _without(text: str, patterns: tuple[str, ...]) -> str:
    """Drop the entries whose package matches a pattern."""

    def replaced(entry: str) -> bool:
        name = normalise(entry.partition("==")[0])
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    return "".join(entry for entry in _ENTRY.split(text) if not replaced(entry))


def _lowest(python: str) -> str:
    found = re.search(r"[0-9]+\.[0-9]+", python)
    assert found is not None
    return found[0]


def _compile(requirements: str, options: list[str], *, known: str) -> str:
    """Run uv; versions of `known`, an earlier lock, stay where the requirements allow them."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "requirements.lock"
        lock.write_text(known, encoding="utf-8")
        arguments = [
            *(os.fspath(find_uv_bin()), "pip", "compile", "-", "--quiet", "--universal", "--generate-hashes"),
            *("--no-header", "--no-annotate", "--no-emit-index-url", "--output-file", str(lock)),
            *options,
        ]
        done = subprocess.run(arguments, input=requirements, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MachineError(
                "the packages could not be resolved",
                place="uv pip compile",
                found=last_lines(done.stderr, 8),
                hint="check the network and the requirement; the old lock stays",
            )
        return lock.read_text(encoding="utf-8")
