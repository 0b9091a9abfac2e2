"""Whether this machine can run recipes; every finding that is not well names its remedy."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

from twinrun.foundation.cache import COMPLETE, cache_root, environment_folder
from twinrun.foundation.errors import InputError, RunError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.processes import read_output
from twinrun.foundation.text import GIB
from twinrun.machine import checks
from twinrun.machine.checks import HostCheck
from twinrun.machine.devices import discover
from twinrun.manifests.cluster import known_gpus
from twinrun.manifests.stack import load_manifest, load_stack, normalise, pins
from twinrun.manifests.vendor import load_vendors

RUN_BYTES = 1 * GIB
INTERPRETER_TIMEOUT_S = 10
_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


class Diagnosis(Frozen):
    """The results of all checks."""

    checks: tuple[HostCheck, ...]

    @property
    def exit_code(self) -> int:
        """3 when something fails, as for any run this machine cannot make."""
        return 3 if any(check.status == "fail" for check in self.checks) else 0


def diagnose(root: Path) -> Diagnosis:
    """Check this machine for the checkout at `root`.

    Raises:
        InputError: the hardware data of the checkout is broken.
    """
    vendors, gpus = load_vendors(root), known_gpus(root)
    found = {name: discover(vendor, gpus) for name, vendor in vendors.items() if vendor.probe}
    devices: list[HostCheck] = []
    for name, one in found.items():
        devices += [checks.check_devices(vendors[name], one, gpus)]
        devices += checks.check_device_files(vendors[name], one)
    for name, one in found.items():
        devices += checks.check_advice(vendors[name], one, _stacks(root))
    there = {name for name, one in found.items() if one.devices} or vendors.keys() - found
    return Diagnosis(checks=(*devices, *_host_checks(root, there), *check_environments(root)))


def _stacks(root: Path) -> list[str]:
    return sorted(path.parent.name for path in (root / "images" / "stacks").glob("*/stack.toml"))


def environment_bytes(root: Path, vendors: Collection[str]) -> int:
    """Return the bytes of the largest environment of the vendors; a broken stack has a check of its own."""
    sizes = [0]
    for name in _stacks(root):
        with contextlib.suppress(InputError):
            stack = load_manifest(root, name)
            if stack.vendor in vendors and stack.environment:
                sizes.append(stack.environment.disk_mib << 20)
    return max(sizes)


def _host_checks(root: Path, vendors: Collection[str]) -> Iterator[HostCheck]:
    """Yield the results of checks; one that cannot be made is unknown, never ok."""
    needed, place = environment_bytes(root, vendors), "choose a folder with --out"
    asked: dict[str, Callable[[], HostCheck]] = {
        "memory": checks.check_memory,
        "shared memory": checks.check_shared_memory,
        "cache disk": lambda: checks.check_disk("cache disk", cache_root(), needed, "set TWINRUN_CACHE"),
        "run disk": lambda: checks.check_disk("run disk", root / "runs", RUN_BYTES, place),
        "docker": checks.check_docker,
    }
    for name, check in asked.items():
        try:
            yield check()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            found, hint = f"not checked: {error}", "the message is the system's own: mend what it names"
            yield HostCheck(name=name, status="unknown", found=found, needed="an answer", hint=hint)


def check_environments(root: Path) -> Iterator[HostCheck]:
    """Name each stack whose lock or environment is broken, and count the environments that are whole."""
    names, folders, whole = _stacks(root), set(), []
    for name in names:
        try:
            stack = load_stack(root, name)
        except InputError as error:
            place = str(error.place).removeprefix(f"{root}/")
            yield _finding(name, "fail", f"{place}: {error.message}", error.hint or "mend the file")
            continue
        folder = environment_folder(name, stack.requirements_sha256(root))
        folders.add(folder.name)
        if not folder.exists():
            continue
        if not (folder / COMPLETE).is_file():
            hint = "the next run with --engine venv installs it anew, unless another is at it"
            yield _finding(name, "warn", "not installed to the end, or by an older twinrun", hint)
        elif fault := _fault(folder, stack.lock(root).read_text(encoding="utf-8")):
            hint = f"`rm -r {shlex.quote(str(folder))}`; the next run with --engine venv makes it again"
            yield _finding(name, "fail", fault, hint)
        else:
            whole.append(name)
    kept = {path.name for path in (cache_root() / "environments").glob("*/") if path.is_dir()}
    found = f"{len(whole)} of {len(names)} made" + (f": {', '.join(whole)}" if whole else "")
    found += f"; of other locks: {', '.join(sorted(kept - folders))}" if kept - folders else ""
    needed = "only for --engine venv"
    yield HostCheck(name="environments", status="ok" if whole else "absent", found=found, needed=needed)


def _finding(stack: str, status: Literal["warn", "fail"], found: str, hint: str) -> HostCheck:
    needed = "locks that belong to the stack, and an environment as they say"
    return HostCheck(name=f"environment ({stack})", status=status, found=found, needed=needed, hint=hint)


def _fault(folder: Path, lock: str) -> str | None:
    """Return what keeps the environment at `folder` from running, or None."""
    command = [str(folder / "bin" / "python"), "-I", "-c", _SITE]
    try:
        site = read_output(command, variables={}, folder=folder, seconds=INTERPRETER_TIMEOUT_S).strip()
    except RunError as error:
        return f"its interpreter fails: {str(error.found or error.message).strip().splitlines()[-1]}"
    installed = {normalise(one.name): one.version for one in distributions(path=[site]) if one.name}
    # A pin with a marker may be for another interpreter.
    required = pins("\n".join(line for line in lock.splitlines() if ";" not in line))
    missing = [name for name, versions in required.items() if installed.get(name) not in versions]
    return f"not as locked: {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}" if missing else None
