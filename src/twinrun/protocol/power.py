"""How power and clocks of devices are read, as vendors name it, and what ranks say of their power.

What a sensor measures is a card, which may be several devices, or all processors of a node.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinrun.foundation.manifest import Frozen
from twinrun.protocol.models.shape import Positive

ADDRESS = "{address}"


class PowerLibrary(Frozen):
    """A library in C that reads the power of a device which is found by its PCI address.

    Each function returns 0 where it succeeds.
    """

    file: str
    """Name under which the loader finds it."""
    start: str
    """Function without arguments that is called first."""
    open: str
    """Function of the PCI address, a string, and of where to put the device's handle, a pointer."""
    read: str
    """Function of that handle, of what `asks` has, and of where to put the number, an unsigned int."""
    asks: tuple[int, ...] = ()
    """Further arguments: which of several numbers is read."""


class PowerSensor(Frozen):
    """One way to read power, or a clock."""

    name: str
    """Name of the source in records."""
    of: Literal["card", "node"] = "card"
    """Whether every rank reads that of its device, or one rank reads those of its node."""
    library: PowerLibrary | None = None
    files: str | None = None
    """Shell pattern of files with a number each, which are added; `{address}` stands for the PCI address."""
    named: str | None = None
    """Expression of what the file `name` beside a file says, where not all of them are added."""
    counts: Literal["power", "energy"] = "power"
    """Whether the number is the power, or energy that adds up."""
    unit: Annotated[float, Field(gt=0)]
    """Watts, joules or MHz in one unit of the number."""
    wraps: str | None = None
    """File beside that of an energy, with the number after which it starts again at 0."""

    @model_validator(mode="after")
    def _one_way(self) -> PowerSensor:
        if (self.library is None) == (self.files is None):
            raise ValueError(f"power sensor `{self.name}` needs one of `library` and `files`")
        if self.wraps and self.counts != "energy":
            raise ValueError(f"power sensor `{self.name}`: only an energy `wraps`")
        return self


class AddressFunction(Frozen):
    """The function of the framework's runtime that says where on the PCI bus a device is.

    Its arguments are where to put the text, how long that may be, and the number of the device.
    """

    library: str
    """Expression that the file name of a library matches which the process has loaded."""
    function: str


class PowerSensors(Frozen):
    """All ways of a vendor, tried in order."""

    address: AddressFunction | None = None
    sensor: tuple[PowerSensor, ...] = ()
    clock: tuple[PowerSensor, ...] = ()
    """Ways to read the engine clock of a device."""

    @model_validator(mode="after")
    def _addressed(self) -> PowerSensors:
        for one in self.sensor + self.clock:
            if self.address is None and (one.library or ADDRESS in (one.files or "")):
                raise ValueError(f"power sensor `{one.name}` needs `address`")
        return self


class PowerReading(PowerSensors):
    """What the ranks of a job are told of power and clocks."""

    devices_per_card: Positive = 1
    gpu: str | None = None
    """Row of images/gpus.toml; null for a card that has none."""
    clock_mhz: float | None = None
    """Peak engine clock of that row; null where it names none."""


class SampledDevice(Frozen):
    """What the process beside a rank samples; a part of the rank's job."""

    pid: int
    address: str | None
    """PCI address, null on a processor and where nobody says it."""
    sensor: tuple[PowerSensor, ...]


class PowerSource(Frozen):
    """Where the power of a training comes from."""

    sensor: str | None
    """Name of the sensor; null where there is no power."""
    reason: str | None = None
    """Why there is none."""
    samples_per_second: Annotated[float, Field(ge=0)] | None = None
    """Readings of the first rank in a second while steps were timed."""
