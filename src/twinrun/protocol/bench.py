"""What a benchmark runs and reports: shared by the host and the script on the devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field, model_validator

from twinrun.foundation.manifest import Frozen
from twinrun.protocol.job import Job, Line, Result
from twinrun.protocol.models.shape import Positive
from twinrun.protocol.training import NotNegative

OptionValue = str | int | bool
Setting = OptionValue | tuple[OptionValue, ...]
Settings = dict[str, Setting]
Rate = Annotated[float, Field(gt=0)]

# The resource whose amounts are bytes of device memory, read or written.
COPY = "copy"
# The baseline of operations of torch, run eagerly: what there is without a kernel, and no rival of one.
EAGER = "torch"


class Label(Frozen):
    """A dimension of a benchmark, for example the scalar type; its values name what is timed."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z_]*$")]
    values: Annotated[tuple[str, ...], Field(min_length=1)]
    default: str | None = None
    """The value that is left out of names."""

    @model_validator(mode="after")
    def _among_values(self) -> Label:
        if self.default is not None and self.default not in self.values:
            raise ValueError(f"`default` is not among the values of `{self.name}`")
        return self


def name_of(labels: tuple[Label, ...], values: Mapping[str, str]) -> str:
    """Return the name of a call: the values of its labels in order, defaults left out."""
    return "-".join(
        values[one.name] for one in labels if one.name in values and values[one.name] != one.default
    )


def possible_names(labels: tuple[Label, ...]) -> Iterator[str]:
    """Yield every name that `labels` can give."""
    for chosen in itertools.product(*(one.values for one in labels)):
        yield name_of(labels, dict(zip((one.name for one in labels), chosen, strict=True)))


class Timing(Frozen):
    """How a benchmark measures."""

    warmup: NotNegative
    """Calls of each implementation before the timed ones."""
    repeats: NotNegative
    """Timed calls of each implementation, whose median counts; 0 checks and does not time."""
    seed: int | None = None
    """Seed of the random inputs; when left out, each point draws one and its record has it."""
    options: Settings = Field(default_factory=dict)
    """What the script is told at every case; a case says otherwise where it must."""


class BenchJob(Job):
    """One case on some number of ranks."""

    case: str
    settings: Settings
    """The options of the benchmark and, over them, those of the case."""
    timing: Timing
    labels: tuple[Label, ...]
    """What the recipe declares that it times."""


class PeakRate(Frozen):
    """What this device was measured to do at most on one resource."""

    resource: str
    """`copy` counts bytes of a copy, read and written; the others count operations."""
    rate: Rate
    """Per second."""
    how: str
    """What is counted, and how it was measured."""


class Work(Frozen):
    """The least that a call must do, whoever does it."""

    formula: str
    """Identifier; the recipe's README says how it counts."""
    amounts: dict[str, float]
    """By resource: bytes for `copy`, operations for the others."""


class Implementation(Frozen):
    """One implementation of a call, checked and, unless only checked, timed."""

    name: str
    version: str
    milliseconds: tuple[Annotated[float, Field(gt=0, lt=1e10)], ...]
    """Time of each timed call; on several ranks the time of the slowest."""
    errors: Annotated[dict[str, Annotated[float, Field(ge=0)] | None], Field(min_length=1)]
    """Relative distance from the float64 reference of each tensor that is returned; None when not finite."""
    kept_bytes: int | None = None
    """Memory that a forward call keeps for the backward one, its outputs left out."""


def largest_error(errors: Mapping[str, float | None]) -> tuple[str, float]:
    """Return which tensor is furthest from its reference, and how far: infinite where it is not finite."""
    found = {name: math.inf if error is None else error for name, error in errors.items()}
    return max(found.items(), key=lambda one: one[1])


class Traffic(Frozen):
    """What the busiest link carried in one direction during one call of ours."""

    counted: NotNegative
    """Bytes, as they were sent and received."""
    expected: Rate
    """Bytes by the formula."""
    formula: str
    """Identifier; the recipe's README says how it counts."""


class Call(Frozen):
    """What was timed under one name: ours, and beside it in the same process the baselines."""

    name: str
    title: str
    """For example `selective scan, forward`."""
    labels: dict[str, str]
    work: Work | None
    allowed_error: Rate
    """A call further from the reference than this ends the run."""
    ours: Implementation
    baselines: tuple[Implementation, ...] = ()
    absent: dict[str, str] = Field(default_factory=dict)
    """Baselines that could not run, and why."""
    bus_bytes: float | None = None
    """Bytes that each link must move, for a collective."""
    traffic: Traffic | None = None


class CallLine(Line):
    """A line of metrics.jsonl."""

    call: Call


class BenchResult(Result):
    """What the script reports of one case when it has ended well."""

    seed: int
    peak_rates: tuple[PeakRate, ...]
    calls: tuple[Call, ...]
    device_memory_bytes: Positive
    peak_memory_bytes: NotNegative

    @model_validator(mode="after")
    def _each_once(self) -> BenchResult:
        timed = [f"{call.name}@{one.name}" for call in self.calls for one in call.baselines]
        names = [*(one.name for one in self.calls), *timed, *(one.resource for one in self.peak_rates)]
        if len(names) > len(set(names)):
            raise ValueError(
                f"two calls, baselines of one call or peak rates have one name: {', '.join(names)}"
            )
        return self
