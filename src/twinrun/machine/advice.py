"""What a vendor advises for a machine that has its driver: settings, and the oldest driver of each stack."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from twinrun.machine.checks import HostCheck
from twinrun.machine.devices import Discovery
from twinrun.machine.probes import matching_files
from twinrun.manifests.vendor import Advice, Vendor

_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)+")


def check_advice(vendor: Vendor, discovery: Discovery, stacks: Iterable[str]) -> Iterator[HostCheck]:
    """Hold the machine against what the vendor advises; where its driver has made no files nothing is said.

    Args:
        stacks: names of the vendor's stacks.
    """
    if discovery.devices and any(matching_files(pattern) for pattern in vendor.device_files):
        yield from _drivers(vendor, discovery, stacks)
        for advice in vendor.advice:
            if any(advice.gpus.search(device.gpu or "") for device in discovery.devices):
                yield from _setting(advice, os.environ)


def _drivers(vendor: Vendor, discovery: Discovery, stacks: Iterable[str]) -> Iterator[HostCheck]:
    # A driver of the kernel itself has the kernel's number, which says nothing here.
    found = sorted({one.driver for one in discovery.devices if one.driver and _VERSION.fullmatch(one.driver)})
    needs = {name: need for name in stacks for need in vendor.driver if need.stacks.fullmatch(name)}
    for driver in found if needs else ():
        old = [f"{name} needs {need.least}" for name, need in needs.items() if _older(driver, need.least)]
        yield HostCheck(
            name=f"driver ({vendor.name})",
            status="warn" if old else "ok",
            found=f"{driver}{': ' if old else ''}{', '.join(old)}",
            needed="as new as the stacks that are run need",
            hint=next(need.source for name, need in needs.items() if name in old[0]) if old else None,
        )


def _older(found: str, least: str) -> bool:
    ours, theirs = ([int(part) for part in one.split(".")] for one in (found, least))
    return ours < theirs


def _setting(advice: Advice, environment: Mapping[str, str]) -> Iterator[HostCheck]:
    if advice.file:
        if not Path(advice.file).is_file():
            return
        value = Path(advice.file).read_text(encoding="utf-8", errors="replace").strip()
    else:
        value = environment.get(str(advice.variable), "")
    fine = advice.wanted.search(value) is not None
    wrong: Literal["warn", "absent"] = "warn" if advice.file else "absent"
    hint = f"{advice.hint}; {advice.changes} ({advice.source})"
    yield HostCheck(
        name=advice.name,
        status="ok" if fine else wrong,
        found=value[:80] or "not set",
        needed=advice.hint if advice.variable else advice.wanted.pattern,
        hint=None if fine else hint,
    )
