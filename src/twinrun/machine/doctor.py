"""Whether this machine can run recipes; every finding that is not well names its remedy."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Literal

from twinrun.foundation.cache import COMPLETE, cache_root, environment_folder
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.processes import last_lines
from twinrun.foundation.text import GIB
from twinrun.machine.advice import check_advice
from twinrun.machine.checks import (
    HostCheck,
    check_device_files,
    check_devices,
    check_disk,
    check_docker,
    check_memory,
    check_shared_memory,
    check_uv,
)
from twinrun.machine.devices import Discovery, discover
from twinrun.manifests.cluster import known_gpus
from twinrun.manifests.stack import load_manifest, load_stack, normalise, pins
from twinrun.manifests.vendor import Gpu, Vendor, load_vendors

RUN_BYTES = 1 * GIB
INTERPRETER_TIMEOUT_S = 10
_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
# Without these files of a RECORD nothing can be imported.
_MODULES = re.compile(r"^((?:[^/,\n]+/__init__|[^/,\n]+)\.py),", re.MULTILINE)


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
    found = {vendor.name: discover(vendor, gpus) for vendor in vendors.values() if vendor.probe}
    devices = [check for name, one in found.items() for check in _device_checks(vendors[name], one, gpus)]
    for name, one in found.items():
        devices += check_advice(
            vendors[name], one, (path.name for path in (root / "images/stacks").glob("*"))
        )
    there = {name for name, one in found.items() if one.devices} or vendors.keys() - found
    return Diagnosis(checks=(*devices, *_host_checks(root, there), *check_environments(root)))


def _device_checks(vendor: Vendor, discovery: Discovery, gpus: dict[str, Gpu]) -> Iterator[HostCheck]:
    yield check_devices(vendor, discovery, gpus)
    yield from check_device_files(vendor, discovery)


def environment_bytes(root: Path, vendors: Collection[str]) -> int:
    """Return the bytes of the largest environment of the vendors; a broken stack has a check of its own."""
    sizes = [0]
    for path in (root / "images" / "stacks").glob("*/stack.toml"):
        with contextlib.suppress(InputError):
            stack = load_manifest(root, path.parent.name)
            if stack.vendor in vendors and stack.environment:
                sizes.append(stack.environment.disk)
    return max(sizes)


def _host_checks(root: Path, vendors: Collection[str]) -> Iterator[HostCheck]:
    needed = environment_bytes(root, vendors)
    checks: dict[str, Callable[[], HostCheck]] = {
        "memory": check_memory,
        "shared memory": check_shared_memory,
        "cache disk": lambda: check_disk("cache disk", cache_root(), needed, "set TWINRUN_CACHE"),
        "run disk": lambda: check_disk("run disk", root / "runs", RUN_BYTES, "choose a folder with --out"),
        "docker": check_docker,
        "uv": check_uv,
    }
    for name, check in checks.items():
        yield _guarded(name, check)


def _guarded(name: str, check: Callable[[], HostCheck]) -> HostCheck:
    """Return the result of `check`; one that cannot be made is unknown, never ok."""
    try:
        return check()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        hint = "the message is the system's own: mend what it names"
        return HostCheck(
            name=name, status="unknown", found=f"not checked: {error}", needed="an answer", hint=hint
        )


def check_environments(root: Path) -> Iterator[HostCheck]:
    """Name each stack whose lock or environment is broken, and count the environments that are whole."""
    names = sorted(path.parent.name for path in (root / "images" / "stacks").glob("*/stack.toml"))
    folders, whole = set(), []
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
    yield _summary(len(names), whole, folders)


def _finding(stack: str, status: Literal["warn", "fail"], found: str, hint: str) -> HostCheck:
    needed = "locks that belong to the stack, and an environment as they say"
    return HostCheck(name=f"environment ({stack})", status=status, found=found, needed=needed, hint=hint)


def _summary(total: int, whole: list[str], current: set[str]) -> HostCheck:
    kept = {path.name for path in (cache_root() / "environments").glob("*/") if path.is_dir()}
    found = f"{len(whole)} of {total} made" + (f": {', '.join(whole)}" if whole else "")
    if others := sorted(kept - current):
        found += f"; of other locks: {', '.join(others)}"
    needed = "only for --engine venv"
    return HostCheck(name="environments", status="ok" if whole else "absent", found=found, needed=needed)


def _fault(folder: Path, lock: str) -> str | None:
    """Return what keeps the environment at `folder` from running, or None."""
    command = [str(folder / "bin" / "python"), "-I", "-c", _SITE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INTERPRETER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its interpreter cannot be started: {getattr(error, 'strerror', None) or error}"
    if done.returncode:
        return f"its interpreter fails: {last_lines(done.stderr, 1).strip()}"
    missing = _missing_packages(Path(done.stdout.strip()), lock)
    return f"not as locked: {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}" if missing else None


def _missing_packages(site: Path, lock: str) -> list[str]:
    """Return the locked packages that `site` does not have, or not in the locked version."""
    installed = {normalise(one.name): one for one in distributions(path=[str(site)]) if one.name}
    # A pin with a marker may be for another interpreter.
    required = pins("\n".join(line for line in lock.splitlines() if ";" not in line))
    return [
        name for name, versions in required.items() if not _importable(installed.get(name), versions, site)
    ]


def _importable(package: Distribution | None, versions: tuple[str, ...], site: Path) -> bool:
    if package is None or package.version not in versions:
        return False
    return all((site / module).is_file() for module in _MODULES.findall(package.read_text("RECORD") or ""))
