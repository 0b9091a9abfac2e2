"""What a benchmark runs and reports: shared by the host and the script on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from twinrun.manifest import Frozen
from twinrun.training import NotNegative, Positive

Value = str | int | bool
Setting = Value | tuple[Value, ...]
Settings = dict[str, Setting]
Rate = Annotated[float, Field(gt=0)]

# The ceiling whose amounts are bytes of device memory, read or written.
COPY = "copy"


class Bench(Frozen):
    """How a benchmark measures."""

    warmup: NotNegative
    """Calls of each measurement before the timed ones."""
    repeats: NotNegative
    """Timed calls of each measurement, whose median counts; 0 checks and does not time."""
    seed: int | None = None
    """Of the random inputs; when left out each point draws one, which its record has."""
    options: Settings = Field(default_factory=dict)
    """What the script is told at every case; a case says otherwise where it must."""


class BenchJob(Frozen):
    """One case as its script receives it; paths are as the script sees them."""

    recipe: str
    point: str
    """Name of the case."""
    settings: Settings
    """The options of the benchmark and, over them, those of the case."""
    bench: Bench
    accelerator: bool
    """Whether the script uses the machine's first GPU; else the processor, without times."""
    out: str
    """Folder the script writes to."""
    metrics: str
    """JSON-lines file that gets a line for each measurement."""


class Ceiling(Frozen):
    """What this device was measured to do at most."""

    id: str
    """`copy` counts bytes of a copy, read and written; the others count operations."""
    rate: Rate
    """Per second."""
    what: str
    """What is counted, and how it was measured."""


class Work(Frozen):
    """The least that a call must do, whoever does it."""

    formula: str
    """Identifier; the recipe's README says how it counts."""
    amounts: dict[str, float]
    """By ceiling: bytes for `copy`, operations for the others."""


class Timing(Frozen):
    """One implementation at one measurement."""

    implementation: str
    version: str
    milliseconds: tuple[float, ...]
    """Of each timed call."""
    errors: Annotated[dict[str, Annotated[float, Field(ge=0)] | None], Field(min_length=1)]
    """Relative distance from the float64 reference of each tensor that is returned; None when not finite."""
    kept_bytes: int | None = None
    """Memory that a forward call keeps for the backward one, its outputs left out."""


def furthest(errors: Mapping[str, float | None]) -> tuple[str, float]:
    """Return which tensor is furthest off, and its distance: infinite where it is not finite."""
    found = {name: math.inf if error is None else error for name, error in errors.items()}
    return max(found.items(), key=lambda one: one[1])


class Measured(Frozen):
    """One measurement: ours, and beside it in the same process what it is held against."""

    id: str
    """Unique among those of the case."""
    operation: str
    """What is drawn in one picture, for example `selective scan, forward`."""
    element: str
    """Type of the elements, for example `bf16`."""
    way: str
    """What of the call is timed."""
    work: Work
    allowed_error: Rate
    """A measurement further from the reference than this ends the run."""
    ours: Timing
    baseline: Timing | None
    baseline_absent: str | None = None
    """Why there is none."""


class MeasuredLine(Frozen):
    """A line of metrics.jsonl."""

    point: str
    measurement: Measured


class BenchResult(Frozen):
    """What the script reports of one case when it has ended well."""

    point: str
    seed: int
    ceilings: tuple[Ceiling, ...]
    measurements: tuple[Measured, ...]
    device_name: str
    """As the framework names it."""
    device_memory_bytes: Positive
    peak_memory_bytes: NotNegative
    libraries: dict[str, str]
