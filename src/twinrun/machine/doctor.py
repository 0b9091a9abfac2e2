"""Whether this machine can run recipes; every finding that is not well names its remedy."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from twinrun.foundation.cache import cache_root
from twinrun.foundation.manifest import Frozen
from twinrun.machine.checks import GIB, HostCheck, host
from twinrun.machine.checks.devices import check_device_files, check_devices
from twinrun.machine.checks.environments import check_environments
from twinrun.machine.devices import discover
from twinrun.manifests.vendor import load_gpus, load_vendors

# A GPU environment is 5.7 GB, and as much again stands in the package cache while it is made.
CACHE_BYTES = 12 * GIB
RUN_BYTES = 1 * GIB


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
    return Diagnosis(checks=(*_device_checks(root), *_host_checks(root), *check_environments(root)))


def _device_checks(root: Path) -> Iterator[HostCheck]:
    gpus = load_gpus(root)
    for vendor in load_vendors(root).values():
        if vendor.probe:
            discovery = discover(vendor, gpus)
            yield check_devices(vendor, discovery, gpus)
            yield from check_device_files(vendor, discovery)


def _host_checks(root: Path) -> Iterator[HostCheck]:
    checks: dict[str, Callable[[], HostCheck]] = {
        "memory": host.check_memory,
        "shared memory": host.check_shared_memory,
        "cache disk": lambda: host.check_disk("cache disk", cache_root(), CACHE_BYTES, "set TWINRUN_CACHE"),
        "run disk": lambda: host.check_disk(
            "run disk", root / "runs", RUN_BYTES, "choose a folder with --out"
        ),
        "docker": host.check_docker,
        "uv": host.check_uv,
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
