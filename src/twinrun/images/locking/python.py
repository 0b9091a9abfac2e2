"""Resolution of Python packages by uv to versions and hashes; the lock file names no index."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from uv import find_uv_bin

from twinrun.foundation.errors import MachineError
from twinrun.foundation.processes import last_lines
from twinrun.manifests.lock_checksum import with_checksums
from twinrun.manifests.stack import Alternative, Stack, matches, normalise, stamp

_ENTRY = re.compile(r"^(?=[A-Za-z0-9])", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\b")


def resolve_python(
    requirements: Path, stack: Stack, *, index: str | None = None, upgrade: bool = False
) -> str:
    """Return the text of the lock file of `requirements`; the existing one lies beside it.

    An entry keeps its hashes while the index has all of them, also when the index has more files since.

    Args:
        index: a further package index, for wheels that only the framework's own index has; without it such
            pins stay out of the lock file, and stack.toml names them as unverified.
        upgrade: allow another version of every package that the requirements do not pin.

    Raises:
        MachineError: the packages cannot be resolved.
    """
    lock = requirements.with_suffix(".lock")
    existing = lock.read_text(encoding="utf-8") if lock.is_file() else ""
    text = requirements.read_text(encoding="utf-8")
    options = ["--python-version", stack.interpreter()]
    if index:
        text = _with_local_versions(text, stack)
        options += ["--index", index, "--index-strategy", "unsafe-best-match"]
    # uv copies the hashes of versions that it keeps from the existing lock file, also wrong ones.
    preferences = "" if upgrade else _HASH.sub("", existing).replace("\\", "")
    entries = _entries(compile_requirements(text, options, preferences=preferences))
    if not index:
        entries = {pin: hashes for pin, hashes in entries.items() if not matches(_name(pin), stack.replaces)}
    for alternative in stack.alternative:
        entries = {pin: hashes | _alternative_hash(pin, alternative) for pin, hashes in entries.items()}
    before = _entries(existing)
    kept = {pin: _stable_hashes(before.get(pin, set()), hashes, stack) for pin, hashes in entries.items()}
    lines = (_format_entry(pin, hashes) for pin, hashes in kept.items())
    return with_checksums("\n".join([stamp(requirements), *lines, ""]))


def package_hashes(lock: str) -> dict[str, set[str]]:
    """Return the hashes of every package, those of all its versions together."""
    found: dict[str, set[str]] = {}
    for pin, hashes in _entries(lock).items():
        found.setdefault(_name(pin), set()).update(hashes)
    return found


def _entries(lock: str) -> dict[str, set[str]]:
    """Return the hashes of every entry by its pin: name, version and marker."""
    parts = _ENTRY.split(lock)
    return {
        part.partition("\\")[0].partition("\n")[0].strip(): set(_HASH.findall(part))
        for part in parts
        if "==" in part.partition("\n")[0] and not part.startswith("#")
    }


def _format_entry(pin: str, hashes: set[str]) -> str:
    return " \\\n    ".join([pin, *(f"--hash=sha256:{digest}" for digest in sorted(hashes))])


def _stable_hashes(before: set[str], now: set[str], stack: Stack) -> set[str]:
    """Return the hashes of before if the index has all of them now, else all that it has."""
    alternatives = {alternative.sha256 for alternative in stack.alternative}
    return before | (now & alternatives) if before - alternatives and before <= now else now


def _alternative_hash(pin: str, alternative: Alternative) -> set[str]:
    """Return the hash of the alternative wheel if its public version is the pinned one."""
    name, _, version = alternative.requirement.partition("==")
    public = version.partition("+")[0]
    same = pin.partition(" ")[0] == f"{normalise(name)}=={public}"
    return {alternative.sha256} if same else set()


def _name(pin: str) -> str:
    return normalise(pin.partition("==")[0])


def _with_local_versions(requirements: str, stack: Stack) -> str:
    """Replace each requirement by the unverified pin of the same package."""
    exact = {normalise(pin.package()): pin.requirement for pin in stack.unverified}
    lines = []
    for line in requirements.splitlines():
        name = normalise(re.split(r"[=<>~! ;#]", line, maxsplit=1)[0])
        lines.append(exact.pop(name, line))
    return "\n".join([*lines, *exact.values(), ""])


def compile_requirements(requirements: str, options: list[str], *, preferences: str = "") -> str:
    """Run `uv pip compile`; versions in the lock file `preferences` stay where the requirements allow."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "requirements.lock"
        lock.write_text(preferences, encoding="utf-8")
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
