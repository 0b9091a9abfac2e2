"""Probes: the programs and kernel files that name a machine's GPUs, as the vendors' manifests give them."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinrun.foundation.manifest import Frozen

KeyPaths = tuple[str, ...]
"""Keys that hold one fact, tried in order; dots stand between nested keys."""


class Fields(Frozen):
    """Where a probe's output holds each fact."""

    name: KeyPaths = ("name",)
    memory: KeyPaths = ("memory",)
    arch: KeyPaths = ("arch",)
    driver: KeyPaths = ("driver",)
    unique_id: KeyPaths = ("unique_id",)
    compute_units: KeyPaths = ("compute_units",)


class Probe(Frozen):
    """One way to ask a machine for a vendor's devices."""

    name: str
    format: Literal["csv", "json", "properties"]
    """`properties`: files of `key value` lines, one folder for each device."""
    command: tuple[str, ...] = ()
    timeout_s: Annotated[float, Field(gt=0)] = 30
    columns: tuple[str, ...] = ()
    """csv: what the columns hold, by the names of `fields`."""
    devices: re.Pattern[str] = re.compile(".*")
    """json: expression of the top-level keys that hold devices; every entry of a top-level list is one."""
    folders: str | None = None
    """properties: shell pattern of the device folders."""
    parts: tuple[str, ...] = ()
    """properties: files to read in each folder."""
    where: dict[str, re.Pattern[str]] = Field(default_factory=dict)
    """What a row must match to be a device."""
    fields: Fields = Fields()
    memory_unit: Annotated[int, Field(gt=0)] = 1
    """Bytes in one unit of memory."""
    compute_unit_parts: Annotated[int, Field(gt=0)] = 1
    """How many of the units that the probe counts make one compute unit."""

    @model_validator(mode="after")
    def _complete(self) -> Probe:
        needed = {"csv": ("command", "columns"), "json": ("command",), "properties": ("folders", "parts")}
        missing = [key for key in needed[self.format] if not getattr(self, key)]
        if missing:
            raise ValueError(
                f"probe `{self.name}` of format `{self.format}` also needs: {', '.join(missing)}"
            )
        return self
