"""What ranks are told of the cards whose power and clocks they read, and what they say of its source."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from twinrun.foundation.manifest import Frozen
from twinrun.protocol.models.shape import Positive


class PowerReading(Frozen):
    """The row of a job's GPU; what a sensor measures is a card, which may be several devices."""

    devices_per_card: Positive = 1
    gpu: str | None = None
    """Row of images/gpus.toml; null for a card that has none."""
    clock_mhz: float | None = None
    """Peak engine clock of that row; null where it names none."""


class PowerSource(Frozen):
    """Where the power of a training comes from."""

    sensor: str | None
    """Name of the sensor; null where there is no power."""
    reason: str | None = None
    """Why there is none."""
    samples_per_second: Annotated[float, Field(ge=0)] | None = None
    """Readings of the first rank in a second while steps were timed."""
