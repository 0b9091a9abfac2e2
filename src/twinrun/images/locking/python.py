"""Resolution of Python packages by uv to versions and hashes; the lock file names no index."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

from uv import find_uv_bin

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.processes import last_lines
from twinrun.foundation.redaction import redacted
from twinrun.manifests.lock_checksum import with_checksums
from twinrun.manifests.stack import Alternative, Source, Stack, matches, normalise, stamp

_ENTRY = re.compile(r"^(?=[A-Za-z0-9])", re.MULTILINE)
_DIRECT = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?==[A-Za-z0-9.+!_-]+( *;[ A-Za-z0-9_.'\"<>=!()]+)?"
)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\b")


def resolve_python(
    requirements: Path, stack: Stack, *, index: str | None = None, upgrade: bool = False
) -> str:
    """Return the text of the lock file of `requirements`; the existing one lies beside it.

    An entry keeps its hashes while the index has all of them, also when the index has more files since.

    Args:
        index: the framework's own package index, for the packages that stack.toml names as unverified and
            for no other; without it they stay out of the lock file.
        upgrade: allow another version of every package that the requirements do not pin.

    Raises:
        MachineError: the packages cannot be resolved.
    """
    lock = requirements.with_suffix(".lock")
    existing = lock.read_text(encoding="utf-8") if lock.is_file() else ""
    text = requirements.read_text(encoding="utf-8")
    _check_requirements(requirements, text)
    options = ["--python-version", stack.interpreter()]
    options += [word for one in stack.source for word in ("--no-binary", one.package())]
    project = _declared_metadata(stack.source)
    if index:
        text = _with_local_versions(text, stack)
        project += _explicit_index(index, stack)
    # uv copies the hashes of versions that it keeps from the existing lock file, also wrong ones.
    preferences = "" if upgrade else _HASH.sub("", existing).replace("\\", "")
    compiled = compile_requirements(text, options, preferences=preferences, project=project)
    entries = _entries(compiled)
    if not index:
        entries = {pin: hashes for pin, hashes in entries.items() if not matches(_name(pin), stack.replaces)}
    for alternative in stack.alternative:
        entries = {pin: hashes | _alternative_hash(pin, alternative) for pin, hashes in entries.items()}
    for source in stack.source:
        entries = {pin: hashes | _built_hash(pin, source) for pin, hashes in entries.items()}
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


def _built_hash(pin: str, source: Source) -> set[str]:
    """Return the hash of the wheel that is built of `source` if it is the pinned package."""
    return {source.wheel} if pin.partition(" ")[0] == source.requirement else set()


def _declared_metadata(sources: tuple[Source, ...]) -> str:
    """Return uv's settings by which the requirements of `sources` are known without running their code."""
    tables = []
    for source in sources:
        name, _, version = source.requirement.partition("==")
        requires = json.dumps(source.requires)
        tables.append(
            "[[tool.uv.dependency-metadata]]\n"
            f'name = "{name}"\nversion = "{version}"\nrequires-dist = {requires}\n'
        )
    return "".join(tables)


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


def _check_requirements(path: Path, text: str) -> None:
    """Refuse every line that is no pinned package: options, addresses and paths would reach uv."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#") and not _DIRECT.fullmatch(line.rstrip()):
            raise InputError(
                "not a pinned package",
                place=f"{path}:{number}",
                found=line[:120],
                allowed="name==version, or a line that begins with #",
            )


def _explicit_index(index: str, stack: Stack) -> str:
    """Return uv's settings under which `index` is asked for the unverified packages and for no other."""
    names = sorted({normalise(pin.package()) for pin in stack.unverified})
    sources = "".join(f'{json.dumps(name)} = {{ index = "framework" }}\n' for name in names)
    table = f'[[tool.uv.index]]\nname = "framework"\nurl = {json.dumps(index)}\nexplicit = true\n'
    return f"{table}\n[tool.uv.sources]\n{sources}"


def compile_requirements(
    requirements: str, options: list[str], *, preferences: str = "", project: str = ""
) -> str:
    """Run `uv pip compile`, which runs no code of a package.

    Args:
        preferences: a lock file whose versions stay where the requirements allow.
        project: further tables of pyproject.toml.
    """
    with tempfile.TemporaryDirectory() as folder:
        lock, source = Path(folder) / "requirements.lock", Path(folder) / "pyproject.toml"
        lock.write_text(preferences, encoding="utf-8")
        wanted = [line for line in requirements.splitlines() if line.strip() and not line.startswith("#")]
        header = f'[project]\nname = "stack"\nversion = "0"\ndependencies = {json.dumps(wanted)}\n'
        source.write_text(f"{header}\n{project}", encoding="utf-8")
        arguments = [
            *(os.fspath(find_uv_bin()), "pip", "compile", "--quiet", "--universal", "--generate-hashes"),
            *("--no-header", "--no-annotate", "--no-emit-index-url", "--only-binary", ":all:"),
            *("--output-file", str(lock), *options, "--", str(source)),
        ]
        done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MachineError(
                "the packages could not be resolved",
                place="uv pip compile",
                found=redacted(last_lines(done.stderr, 8)),
                hint="check the network and the requirement; the old lock stays",
            )
        return lock.read_text(encoding="utf-8")
