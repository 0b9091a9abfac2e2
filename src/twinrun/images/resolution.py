"""Resolution of packages to versions and checksums: Python's by uv, the system's by apt."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from uv import find_uv_bin

from twinrun.foundation.errors import InputError
from twinrun.foundation.processes import tool_output
from twinrun.images.apt_archive import ESSENTIAL, AptArchive
from twinrun.manifests.locks import AptLock, PythonLock, parse_python_lock, python_lock_text
from twinrun.manifests.packages import ReducedPackage, SourcePackage
from twinrun.manifests.stack import Stack, matches, normalise, stamp

_DIRECT = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?==[A-Za-z0-9.+!_-]+( *;[ A-Za-z0-9_.'\"<>=!()]+)?"
)
_EXACT = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([A-Za-z0-9.+!_-]+)", re.MULTILINE)

# usr-is-merged is installed before all others: /bin is a link from the start.
_ROOT = (*ESSENTIAL, "usr-is-merged")


def resolve_python(
    requirements: Path,
    stack: Stack,
    *,
    index: str | None = None,
    verified: frozenset[str] = frozenset(),
    upgrade: bool = False,
) -> str:
    """Return the text of the lock file of `requirements`; the existing one lies beside it.

    An entry keeps its hashes while the index has all of them, also when the index has more files since.

    Args:
        index: the framework's own package index, for the packages that stack.toml names as unverified and
            for no other; without it they stay out of the lock file.
        verified: attested pins whose hashes the framework's own index was seen to have.
        upgrade: allow another version of every package that the requirements do not pin.

    Raises:
        InputError: an attested wheel is of another version than the requirements ask for.
        MachineError: the packages cannot be resolved.
    """
    text = requirements.read_text(encoding="utf-8")
    _check_requirements(requirements, text)
    before = existing_lock(requirements.with_suffix(".lock"))
    options = ["--python-version", stack.interpreter()]
    options += [word for one in stack.source for word in ("--no-binary", one.package())]
    project = declared_metadata((*stack.source, *stack.reduced))
    if index and stack.unverified:
        text = _with_local_versions(text, stack)
        project += _explicit_index(index, stack)
    # Without hashes: uv would copy those of versions that it keeps, also wrong ones.
    preferences = [] if upgrade else list(before)
    overrides = [one.requirement for one in stack.lifted]
    entries = compile_requirements(
        text, options, preferences=preferences, project=project, overrides=overrides
    )
    if not index or stack.attested:
        entries = {pin: hashes for pin, hashes in entries.items() if not matches(_name(pin), stack.replaces)}
    entries |= _attested_entries(requirements, text, stack)
    kept = {
        pin: _stable_hashes(before.get(pin, frozenset()), hashes | _own_hashes(pin, stack), stack)
        for pin, hashes in sorted(entries.items(), key=lambda entry: _name(entry[0]))
    }
    return python_lock_text(stamp(requirements), kept, verified=verified & kept.keys())


def existing_lock(lock: Path) -> PythonLock:
    """Return the entries of a lock file, none when it is absent or broken."""
    text = lock.read_text(encoding="utf-8", errors="replace") if lock.is_file() else ""
    with contextlib.suppress(InputError):
        return parse_python_lock(text, place=str(lock))
    return {}


def _stable_hashes(before: frozenset[str], now: frozenset[str], stack: Stack) -> frozenset[str]:
    """Return the hashes of before if the index has all of them now, else all that it has."""
    alternatives = {alternative.sha256 for alternative in stack.alternative}
    return before | (now & alternatives) if before - alternatives and before <= now else now


def _own_hashes(pin: str, stack: Stack) -> frozenset[str]:
    """Return the hashes in stack.toml: of an alternative of the same public version, and of what is built."""
    entry = pin.partition(" ")[0]
    alternatives = {one.sha256 for one in stack.alternative if _public(one.requirement) == entry}
    return frozenset(alternatives | {one.wheel for one in stack.source if one.requirement == entry})


def _public(requirement: str) -> str:
    name, _, version = requirement.partition("==")
    return f"{normalise(name)}=={version.partition('+')[0]}"


def declared_metadata(packages: tuple[SourcePackage | ReducedPackage, ...]) -> str:
    """Return uv's settings by which packages require what stack.toml says; no code of theirs is run."""
    tables = []
    for source in packages:
        name, _, version = source.requirement.partition("==")
        requires = json.dumps(source.requires)
        tables.append(
            "[[tool.uv.dependency-metadata]]\n"
            f'name = "{name}"\nversion = "{version}"\nrequires-dist = {requires}\n'
        )
    return "".join(tables)


def _attested_entries(requirements: Path, text: str, stack: Stack) -> PythonLock:
    """Return the attested wheels of a stack as entries of the lock of packages that they belong to."""
    asked = {normalise(name): version for name, version in _EXACT.findall(text)}
    entries: dict[str, set[str]] = {}
    for wheel in stack.attested if any(one.package() in asked for one in stack.attested) else ():
        public = wheel.version().partition("+")[0]
        if (wanted := asked.get(wheel.package(), public)) != public:
            raise InputError(
                "an attested wheel is of another version",
                place=str(requirements),
                found=wheel.file,
                allowed=f"{wheel.package()}=={wanted}",
            )
        entries.setdefault(wheel.requirement(), set()).add(wheel.sha256)
    return {pin: frozenset(hashes) for pin, hashes in entries.items()}


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


def compile_requirements(requirements: str, options: list[str], **further: Any) -> PythonLock:
    """Run `uv pip compile`, which runs no code of a package; takes the same as `compiled_text`."""
    text = compiled_text(requirements, [*options, "--no-annotate"], **further)
    return parse_python_lock(text, place="uv pip compile")


def compiled_text(
    requirements: str,
    options: list[str],
    *,
    preferences: Iterable[str] = (),
    project: str = "",
    overrides: Iterable[str] = (),
) -> str:
    """Return the lock that `uv pip compile` prints, with the requirers of each package as comments.

    Args:
        preferences: entries of a lock whose versions stay where the requirements allow.
        project: further tables of pyproject.toml.
        overrides: requirements that replace what any package declares for the same package.

    Raises:
        MachineError: the packages cannot be resolved.
    """
    with tempfile.TemporaryDirectory() as folder:
        lock, source = Path(folder) / "requirements.lock", Path(folder) / "pyproject.toml"
        lock.write_text("\n".join(preferences), encoding="utf-8")
        # As an option: uv leaves the same key of pyproject.toml out where a user has set UV_NO_CONFIG.
        lifted = Path(folder) / "overrides.txt"
        lifted.write_text("\n".join(overrides), encoding="utf-8")
        wanted = [line for line in requirements.splitlines() if line.strip() and not line.startswith("#")]
        header = f'[project]\nname = "stack"\nversion = "0"\ndependencies = {json.dumps(wanted)}\n'
        source.write_text(f"{header}\n{project}", encoding="utf-8")
        arguments = [
            *(os.fspath(find_uv_bin()), "pip", "compile", "--quiet", "--universal", "--generate-hashes"),
            *("--no-header", "--no-emit-index-url", "--only-binary", ":all:"),
            # Whatever else is on the path is not looked for.
            *("--python", sys.executable, "--override", str(lifted), "--output-file", str(lock)),
            *(*options, "--", str(source)),
        ]
        tool_output(
            arguments,
            folder=Path(folder),
            failure="the packages could not be resolved",
            place="uv pip compile",
            hint="check the network and the requirement; the old lock stays",
        )
        return lock.read_text(encoding="utf-8")


def resolve_system(stack: Stack, archive: AptArchive) -> AptLock:
    """Return the system packages of a stack, each in the first stage that needs it.

    Raises:
        InputError: no such package in the suite.
    """
    base, runtime = archive.resolve(_ROOT), archive.resolve(stack.packages)
    return AptLock(base=base, runtime=runtime, build=archive.resolve(stack.build_packages))
