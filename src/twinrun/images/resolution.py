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
from twinrun.manifests.locks import (
    AptLock,
    PythonLock,
    ReducedPackage,
    SourcePackage,
    parse_python_lock,
    python_lock_text,
)
from twinrun.manifests.stack import Stack, framework_pins, matches, normalise, stamp

_DIRECT = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?==[A-Za-z0-9.+!_-]+( *;[ A-Za-z0-9_.'\"<>=!()]+)?"
)
# usr-is-merged is installed before all others: /bin is a link from the start.
_ROOT = (*ESSENTIAL, "usr-is-merged")


def resolve_python(requirements: Path, stack: Stack, *, upgrade: bool = False) -> str:
    """Return the text of the lock file of `requirements`; the existing one lies beside it.

    An entry keeps its hashes while the index has all of them, also when the index has more files since. What
    stands in framework.txt goes into the lock as it is, in place of the packages that `replaces` names.

    Args:
        upgrade: allow another version of every package that the requirements do not pin.

    Raises:
        InputError: a line of the requirements is no pinned package.
        MachineError: the packages cannot be resolved.
    """
    text = requirements.read_text(encoding="utf-8")
    _check_requirements(requirements, text)
    framework = "".join(path.read_text(encoding="utf-8") for path in framework_pins(requirements))
    before = existing_lock(requirements.with_suffix(".lock"))
    options = ["--python-version", stack.interpreter()]
    options += [word for one in stack.source for word in ("--no-binary", one.package())]
    entries = compile_requirements(
        text,
        options,
        # Without hashes: uv would copy those of versions that it keeps, also wrong ones.
        preferences=[] if upgrade else list(before),
        project=declared_metadata((*stack.source, *stack.reduced)),
        overrides=[one.requirement for one in stack.lifted],
    )
    built = {one.requirement: frozenset({one.wheel}) for one in stack.source}
    kept = {}
    for pin, hashes in sorted(entries.items(), key=lambda entry: _name(entry[0])):
        if not (framework and matches(_name(pin), stack.replaces)):
            now = hashes | built.get(pin.partition(" ")[0], frozenset())
            kept[pin] = before[pin] if pin in before and before[pin] <= now else now
    return python_lock_text(stamp(requirements), kept) + framework


def existing_lock(lock: Path) -> PythonLock:
    """Return the entries of a lock file, none when it is absent or broken."""
    text = lock.read_text(encoding="utf-8", errors="replace") if lock.is_file() else ""
    with contextlib.suppress(InputError):
        return parse_python_lock(text, place=str(lock))
    return {}


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


def _name(pin: str) -> str:
    return normalise(pin.partition("==")[0])


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
    root = (*archive.resolve(_ROOT), *archive.resolve(stack.packages))
    return AptLock(root=root, build=archive.resolve(stack.build_packages))
