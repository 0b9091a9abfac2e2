"""The devices of a vendor on this machine, as its probes name them."""

from __future__ import annotations

import os
from itertools import groupby

from twinrun.errors import MachineError
from twinrun.manifest import Frozen
from twinrun.probe import HangError, Probe, Probed, ask
from twinrun.probe_answer import parse_probe
from twinrun.vendor import Gpu, Vendor, identify
from twinrun.visibility import visible


class Device(Frozen):
    """What the framework sees as one GPU: a die, where a card has several."""

    index: int
    """Place in the probe's list, counted before any variable hides devices."""
    name: str
    """As probed."""
    gpu: str | None
    """Row of images/gpus.toml; null for a model, or a part of one, that has no row."""
    arch: str | None
    memory_bytes: int | None
    unique_id: str | None
    driver: str | None


class Attempt(Frozen):
    """One probe that was tried."""

    probe: str
    understood: bool
    """False when the probe should have answered and did not: the machine may have devices."""
    hangs: bool = False
    answer: str


class Search(Frozen):
    """What a vendor's probes say about this machine."""

    devices: tuple[Device, ...]
    """Those this process may use."""
    attempts: tuple[Attempt, ...]
    hidings: tuple[str, ...] = ()
    """What the environment hides."""

    def __str__(self) -> str:
        told = groupby(self.attempts, key=lambda attempt: attempt.answer)
        answers = (f"{', '.join(attempt.probe for attempt in same)}: {answer}" for answer, same in told)
        return "; ".join([*answers, *self.hidings])


def search(vendor: Vendor, gpus: dict[str, Gpu]) -> Search:
    """Ask the vendor's probes, in order, until one names devices."""
    attempts: list[Attempt] = []
    hanging: set[str] = set()
    for probe in vendor.probe:
        if hanging.intersection(probe.command[:1]):
            continue
        attempt, probed = _attempt(probe)
        attempts.append(attempt)
        if attempt.hangs:
            hanging.add(probe.command[0])
        if probed:
            devices = tuple(_device(index, one, vendor, gpus) for index, one in enumerate(probed))
            places, hidings = visible([one.unique_id for one in probed], vendor.hidden_by, os.environ)
            return Search(
                devices=tuple(devices[place] for place in places),
                attempts=tuple(attempts),
                hidings=tuple(str(hiding) for hiding in hidings),
            )
    return Search(devices=(), attempts=tuple(attempts))


def _attempt(probe: Probe) -> tuple[Attempt, tuple[Probed, ...]]:
    if not probe.available():
        return Attempt(probe=probe.name, understood=True, answer="not on this machine"), ()
    try:
        probed = parse_probe(probe, ask(probe))
    except MachineError as error:
        answer = f"{error.message} ({error.found})" if error.found else error.message
        hangs = isinstance(error, HangError)
        return Attempt(probe=probe.name, understood=False, hangs=hangs, answer=answer), ()
    return Attempt(probe=probe.name, understood=True, answer=f"{len(probed)} devices"), probed


def _device(index: int, probed: Probed, vendor: Vendor, gpus: dict[str, Gpu]) -> Device:
    return Device(
        index=index,
        name=probed.name,
        gpu=identify(probed, vendor, gpus),
        arch=None if probed.arch is None else vendor.arch_names.get(probed.arch, probed.arch),
        memory_bytes=probed.memory_bytes,
        unique_id=probed.unique_id,
        driver=probed.driver,
    )
