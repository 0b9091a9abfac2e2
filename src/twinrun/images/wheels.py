"""Wheels that the locks name: which entries an image takes, fetched and verified by pip."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.markers import Marker, default_environment

from twinrun.foundation.cache import locked_folder
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.processes import tool_output
from twinrun.manifests.locks import SourcePackage, parse_python_lock
from twinrun.manifests.stack import LoadedStack, Stack, normalise

# Entries of a lock, as `name==version`, with the hashes that each allows.
Entries = dict[str, tuple[str, ...]]
# Debian's architecture to Python's platform.machine().
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
# The C library of the newest base runs wheels for older ones too.
_NEWEST_GLIBC_MINOR = 39
_OLD_PLATFORMS = ("manylinux2014", "manylinux2010", "manylinux1", "linux")
_OPTIONS = (
    *("--quiet", "--quiet", "--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar=off"),
    *("--no-cache-dir", "--require-hashes"),
)
# No source is compiled for a device here, and a wheel has no time or order of its own.
_SAME_BYTES = {"DS_BUILD_OPS": "0", "PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": "1577836800"}


def requirements(lock: Path, stack: Stack) -> Entries:
    """Return the entries of a lock whose marker holds in the image; raises InputError."""
    version = stack.interpreter()
    # Stacks are for Linux, as this machine is; the rest of the image is not this machine's.
    told = {
        "python_version": version,
        "python_full_version": f"{version}.0",
        "platform_machine": _machine(stack),
    }
    environment = {name: str(value) for name, value in default_environment().items()} | told
    found = {}
    for pin, digests in parse_python_lock(lock.read_text(encoding="utf-8"), place=str(lock)).items():
        entry, _, marker = pin.partition(" ; ")
        if not marker or Marker(marker).evaluate(environment):
            found[entry] = tuple(sorted(digests))
    return found


def _machine(stack: Stack) -> str:
    return _MACHINES.get(stack.architecture(), stack.architecture())


def image_packages(root: Path, loaded: LoadedStack) -> dict[str, str]:
    """Return the Python packages that the image has by its lock, names normalised, with their versions."""
    pins = (pin.partition("==") for pin in requirements(loaded.lock(root), loaded.stack))
    return {normalise(name): version for name, _, version in pins}


def requirements_text(entries: Entries) -> str:
    """Return entries as pip reads them."""
    lines = (" ".join([pin, *(f"--hash=sha256:{one}" for one in hashes)]) for pin, hashes in entries.items())
    return "".join(f"{line}\n" for line in lines)


def fetch_wheels(
    entries: Entries,
    *,
    lock: str,
    wheelhouse: Path | None,
    stack: Stack,
    index: str | None,
    say: Callable[[str], None],
) -> dict[Path, str]:
    """Return the verified wheel of each entry with its SHA-256, fetched into the cache where it has none.

    Args:
        lock: path of the lock, for messages.
        wheelhouse: folder with all of them; nothing is fetched then.
        index: a further package index, for wheels that only the framework's own has.

    Raises:
        InputError: the wheelhouse lacks one, or has another file under its name.
        MachineError: one cannot be downloaded.
    """
    if not entries:
        return {}
    if wheelhouse is not None:
        try:
            return _resolved(entries, wheelhouse, stack)
        except MachineError as error:
            hint = f"{lock} names them; a machine that has built the image writes such a folder with --save"
            message = "the folder lacks locked Python packages, or has others under their names"
            raise InputError(message, place=str(wheelhouse), found=error.found, hint=hint) from None
    # One at a time: a second would take away what the first has half written, as a changed file.
    with locked_folder("wheels") as folder:
        try:
            return _resolved(entries, folder, stack)
        except MachineError:
            say(f"fetching {len(entries)} Python packages of {lock}, those that the cache lacks")
        sources = {one.requirement: one for one in stack.source}
        for pin in entries.keys() & sources.keys():
            _build({pin: entries[pin]}, folder, sources[pin])
        wheels = {pin: hashes for pin, hashes in entries.items() if pin not in sources}
        further = [f"--extra-index-url={index}"] if index else []
        _pip("download", wheels, ["--dest", str(folder), *further, *_platform(stack)])
        return _resolved(entries, folder, stack)


def _resolved(entries: Entries, folder: Path, stack: Stack) -> dict[Path, str]:
    """Let pip choose and verify the files of a folder; raises MachineError."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        options = ("--isolated", "--dry-run", "--ignore-installed", "--no-index", "--find-links", str(folder))
        _pip("install", entries, [*options, "--target", name, "--report", str(report), *_platform(stack)])
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    files = (one["download_info"] for one in found)
    return {
        Path(unquote(urlsplit(one["url"]).path)): one["archive_info"]["hashes"]["sha256"] for one in files
    }


def _platform(stack: Stack) -> list[str]:
    new = [f"manylinux_2_{minor}" for minor in range(_NEWEST_GLIBC_MINOR, 4, -1)]
    tags = [word for one in (*new, *_OLD_PLATFORMS) for word in ("--platform", f"{one}_{_machine(stack)}")]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={stack.interpreter()}", *tags]


def _build(entry: Entries, folder: Path, source: SourcePackage) -> None:
    """Build the wheel of a source, both by the hashes of the lock: nothing in it depends on the machine."""
    if any(folder.glob(f"{source.requirement.replace('-', '_').replace('==', '-')}-*.whl")):
        return
    with tempfile.TemporaryDirectory() as settings:
        backend = Path(settings) / "backend.txt"
        backend.write_text("\n".join(source.backend), encoding="utf-8")
        # pip reads the first since 25.3, and the second before.
        pinned = {"PIP_BUILD_CONSTRAINT": str(backend), "PIP_CONSTRAINT": str(backend)}
        _pip("wheel", entry, ["--wheel-dir", str(folder), "--no-binary=:all:"], pinned | _SAME_BYTES)


def _pip(command: str, entries: Entries, options: list[str], variables: dict[str, str] | None = None) -> None:
    """Run pip, which reads its own configuration of indexes and certificates and runs no code of a wheel."""
    with tempfile.TemporaryDirectory() as name:
        listed = Path(name) / "requirements.txt"
        listed.write_text(requirements_text(entries), encoding="utf-8")
        tool_output(
            [sys.executable, "-m", "pip", command, *_OPTIONS, *options, "--requirement", str(listed)],
            variables=variables,
            failure="the Python packages cannot be had as they are locked",
            place=f"pip {command}",
            hint="check the network and pip's configuration, or carry them in with --wheelhouse",
        )
