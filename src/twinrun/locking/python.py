"""Python packages resolved by uv to versions and hashes; the lock names no index."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from uv import find_uv_bin

from twinrun.errors import MachineError
from twinrun.process import last_lines
from twinrun.seal import sealed
from twinrun.stack import Alternative, Stack, matches, normalise, stamp

_ENTRY = re.compile(r"^(?=[A-Za-z0-9])", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\b")


def resolve_python(
    requirements: Path, stack: Stack, *, index: str | None = None, upgrade: bool = False
) -> str:
    """Return the text of the lock that belongs to `requirements`, beside which the old one lies.

    An entry whose files are all still on the index stays as it is, though more files have come since.

    Args:
        index: a further package index, for wheels that only the framework's own index carries;
            without it such pins stay out of the lock, and stack.toml names them as unverified.
        upgrade: let every package move that the requirements do not pin.

    Raises:
        MachineError: the packages cannot be resolved.
    """
    lock = requirements.with_suffix(".lock")
    old = lock.read_text(encoding="utf-8") if lock.is_file() else ""
    wanted = requirements.read_text(encoding="utf-8")
    options = ["--python-version", stack.interpreter()]
    if index:
        wanted = _with_local_versions(wanted, stack)
        options += ["--index", index, "--index-strategy", "unsafe-best-match"]
    # uv takes the hashes of what it keeps from the old lock, also wrong ones.
    known = "" if upgrade else _HASH.sub("", old).replace("\\", "")
    entries = _entries(compile_requirements(wanted, options, known=known))
    if not index:
        left_out = {head for head in entries if matches(_name(head), stack.replaces)}
        entries = {head: hashes for head, hashes in entries.items() if head not in left_out}
    for alternative in stack.alternative:
        entries = {head: hashes | _second(head, alternative) for head, hashes in entries.items()}
    before = _entries(old)
    kept = {head: _kept(before.get(head, set()), hashes, stack) for head, hashes in entries.items()}
    written = (_written(head, hashes) for head, hashes in kept.items())
    return sealed("\n".join([stamp(requirements), *written, ""]))


def hashes_of(lock: str) -> dict[str, set[str]]:
    """Return the hashes of every package, of all its versions together."""
    found: dict[str, set[str]] = {}
    for head, hashes in _entries(lock).items():
        found.setdefault(_name(head), set()).update(hashes)
    return found


def _entries(lock: str) -> dict[str, set[str]]:
    """Return the hashes of every entry, by its first line: name, version and marker."""
    parts = _ENTRY.split(lock)
    return {
        part.partition("\\")[0].partition("\n")[0].strip(): set(_HASH.findall(part))
        for part in parts
        if "==" in part.partition("\n")[0] and not part.startswith("#")
    }


def _written(head: str, hashes: set[str]) -> str:
    return " \\\n    ".join([head, *(f"--hash=sha256:{digest}" for digest in sorted(hashes))])


def _kept(before: set[str], now: set[str], stack: Stack) -> set[str]:
    """Return the old hashes if the index has all of them, or all that it has."""
    second = {alternative.sha256 for alternative in stack.alternative}
    return before | (now & second) if before - second and before <= now else now


def _second(head: str, alternative: Alternative) -> set[str]:
    """Return the hash of the second-hand wheel if it satisfies the pin, which has no local label."""
    name, _, version = alternative.requirement.partition("==")
    public = version.partition("+")[0]
    fits = head.partition(" ")[0] == f"{normalise(name)}=={public}"
    return {alternative.sha256} if fits else set()


def _name(head: str) -> str:
    return normalise(head.partition("==")[0])


def _with_local_versions(requirements: str, stack: Stack) -> str:
    """Replace each requirement by the unverified pin of the same package."""
    exact = {normalise(pin.package()): pin.requirement for pin in stack.unverified}
    lines = []
    for line in requirements.splitlines():
        name = normalise(re.split(r"[=<>~! ;#]", line, maxsplit=1)[0])
        lines.append(exact.pop(name, line))
    return "\n".join([*lines, *exact.values(), ""])


def compile_requirements(requirements: str, options: list[str], *, known: str = "") -> str:
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
