"""The host, the devices and the state of the project's files that a record holds."""

from __future__ import annotations

from twinrun.foundation.manifest import Frozen


class Device(Frozen):
    """What the framework sees as one GPU: a die, where a card has several."""

    index: int
    """Place in the probe's list, counted before any variable hides devices."""
    name: str
    """Name that the probe prints."""
    gpu: str | None
    """Row of images/gpus.toml; null for a model, or a part of one, that has no row."""
    arch: str | None
    memory_bytes: int | None
    unique_id: str | None
    driver: str | None


class Machine(Frozen):
    """One host, and the devices of one vendor on it."""

    vendor: str
    devices: tuple[Device, ...]
    driver: str | None
    host: str
    cpu: str
    cpu_count: int
    """Processors this process may run on."""
    memory_bytes: int
    kernel: str
    probe: str
    """Which probes were tried and what they answered."""


class Revision(Frozen):
    """The state of the project's own files."""

    commit: str | None
    changes_sha256: str | None
    """Digest of the uncommitted difference; null when there is none."""
