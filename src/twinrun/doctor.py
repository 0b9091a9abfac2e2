"""Whether this machine can run recipes; every finding that is not well names its remedy."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from twinrun.cache import cache_root
from twinrun.checks import GIB, Check, host
from twinrun.checks.devices import check_device_files, check_devices
from twinrun.hardware import load_gpus, load_vendors, search
from twinrun.manifest import Frozen

# A GPU environment is 5.7 GB, and as much again stands in the package cache while it is made.
CACHE_BYTES = 12 * GIB
RUN_BYTES = 1 * GIB


class Examination(Frozen):
    """All findings."""

    checks: tuple[Check, ...]

    @property
    def exit_code(self) -> int:
        """3 when something fails, as for any run this machine cannot make."""
        return 3 if any(check.status == "fail" for check in self.checks) else 0


def examine(root: Path) -> Examination:
    """Check this machine for the checkout at `root`.

    Raises:
        InputError: the hardware data of the checkout is broken.
    """
    checks = (host.check_interpreter(), *_devices(root), *_host(root))
    return Examination(checks=checks)


def _devices(root: Path) -> Iterator[Check]:
    gpus = load_gpus(root)
    for vendor in load_vendors(root).values():
        if vendor.probe:
            result = search(vendor, gpus)
            yield check_devices(vendor, result, gpus)
            yield from check_device_files(vendor, result)


def _host(root: Path) -> Iterator[Check]:
    checks: dict[str, Callable[[], Check]] = {
        "memory": host.check_memory,
        "shared memory": host.check_shared_memory,
        "cache disk": lambda: host.check_disk("cache disk", cache_root(), CACHE_BYTES, "set TWINRUN_CACHE"),
        "run disk": lambda: host.check_disk(
            "run disk", root / "runs", RUN_BYTES, "choose a folder with --out"
        ),
        "docker": host.check_docker,
        "uv": host.check_uv,
    }
    for manifest in sorted((root / "images" / "stacks").glob("*/stack.toml")):
        stack = manifest.parent.name
        checks[f"environment ({stack})"] = partial(host.check_environment, root, stack)
    for name, check in checks.items():
        yield _made(name, check)


def _made(name: str, check: Callable[[], Check]) -> Check:
    """Return the finding, or that there is none: a check that cannot be made is never taken for well."""
    try:
        return check()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        hint = "the message above is the system's own"
        return Check(
            name=name, status="unknown", found=f"not checked: {error}", needed="an answer", hint=hint
        )
