"""Claims of a publication: what is said, of which hardware or between which records, and where it stands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.metrics import RATIO, Reach
from twinrun.manifests.restatements import ROUNDING, Counterexample, Restatement, Source, near
from twinrun.protocol.layout import Precision
from twinrun.protocol.measurements import Per

Kind = Literal["absolute", "ratio", "invariant", "parity", "score"]


# How a text starts that the template bakes and nobody has edited yet.
PLACEHOLDER = "placeholder"


def placeholders_of(content: Mapping[str, Any], key: str) -> Iterator[str]:
    """Yield the key of each text that is still a placeholder."""
    for name, value in content.items():
        inner = f"{key}.{name}"
        if isinstance(value, str) and value.startswith(PLACEHOLDER):
            yield inner
        elif isinstance(value, Mapping):
            yield from placeholders_of(value, inner)


def _refuse(claim: str, *reasons: tuple[object, str]) -> None:
    """Raise ValueError for the first reason that there is."""
    for given, said in reasons:
        if given:
            raise ValueError(f"claim `{claim}`: {said}")


class PublishedHardware(Frozen):
    """What a published number was measured on."""

    gpu: str
    """Row of images/gpus.toml."""
    cards: Annotated[int, Field(gt=0)]
    """Cards over all nodes; one card may be several devices."""
    nodes: Annotated[int, Field(gt=0)]
    devices: Annotated[int, Field(gt=0)] | None = None
    """Devices used, where that is not all of the cards: a die of one that has two."""
    software: str
    """Software of the measurement, where the publication names it."""


class PublishedStatement(Frozen):
    """What every kind of claim has."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    statement: str
    """The claim in one sentence."""
    because: str
    """Why this tolerance, or margin."""
    source: Source


class RestatedStatement(PublishedStatement):
    """What is said of a metric, and in another one where the published hardware or scale is not."""

    metric: str
    """Row of recipes/metrics.toml."""
    per: Per
    """What one published number counts: a card of two dies is two devices."""
    formula: str | None = None
    """Identifier in the formulas; required where the metric has any."""
    measurement: str | None = None
    """Which measurement of the point, where its metric has several."""
    tolerance: Annotated[float, Field(gt=0, lt=1)]
    """Relative to `value`; to a value of 0 the largest distance, for curves of a parity the widest bound."""
    here: Restatement | None = None
    """What it says where the published hardware or scale is not, or of other GPUs of both sides' vendors."""
    why_none: str | None = None
    """Why there is no restatement, where there is none."""

    @model_validator(mode="after")
    def _restated_or_why_not(self) -> Self:
        if (self.here is None) == (self.why_none is None):
            raise ValueError(f"claim `{self.id}` needs either a table `here` or a reason `why_none`")
        return self


class Claim(RestatedStatement):
    """One checkable statement of the publication; its unit, direction and what it counts are its metric's."""

    kind: Kind
    unit: str
    """Unit of the metric, or `ratio` for a ratio of two points."""
    point: str | None = None
    """The point an absolute value belongs to."""
    between: tuple[str, str] | None = None
    """Points of a ratio, the first over the second, or the two of a parity, else of all whole curves."""
    value: float
    """The reference; where a metric is a curve or a fact, which have none, the expected distance, 0."""
    better: Literal["higher", "lower", "equal"]
    """Direction of goodness, that of the metric: a run that is worse by more than the tolerance fails. If
    `equal`, of scores of published weights, what lies farther away on either side is another evaluation."""
    bounds: dict[Precision, Annotated[float, Field(gt=0, lt=1)]] = Field(default_factory=dict)
    """The widest envelope of a parity of curves, by type of arithmetic, whatever control runs show."""
    configuration: str | None = None
    """Row of `configurations`. Of a score it is the model, and its fields stand for the fingerprint; another
    claim is about the fingerprint but for these fields."""
    rules: dict[str, str] = Field(default_factory=dict)
    """Rules by task of a score, which is part of the number."""
    reach: Reach = Reach()
    """What the points must span, where the statement speaks of several sizes or kinds of hardware."""
    hardware: PublishedHardware | None = None

    @model_validator(mode="after")
    def _complete(self) -> Claim:
        needed = {"absolute": ("point", "hardware"), "ratio": ("between",)}
        needed["score"] = ("measurement", "configuration")
        missing = [name for name in needed.get(self.kind, ()) if getattr(self, name) is None]
        equal = self.kind != "score" and self.is_distance != (self.better == "equal")
        zero = self.value < 0 or (self.value == 0 and not self.is_distance)
        wide = self.bounds and (self.kind != "parity" or max(self.bounds.values()) > self.tolerance)
        _refuse(
            self.id,
            (missing, f"of kind `{self.kind}` also needs: {', '.join(missing)}"),
            (self.between and self.between[0] == self.between[1], "`between` names one point twice"),
            (equal, "`better` is `equal` for invariants, parities and scores alone"),
            (bool(self.rules) != (self.kind == "score"), "`rules` belong to scores, and to each of them"),
            (zero, f"`value` must be positive, found {self.value:g}"),
            (wide, "`bounds` are of parities, none above `tolerance`"),
        )
        return self

    @property
    def is_distance(self) -> bool:
        """Whether curves or values are also held against each other, instead of against a number alone."""
        return self.kind in ("invariant", "parity")


class ClaimSide(Frozen):
    """What the records of one side have in common."""

    gpu: str
    """Row of images/gpus.toml."""
    stack: str | None = None
    """Stack of images/stacks/, or the published software where this project has no such stack; any, where
    the publication names none."""
    point: str | None = None
    """The point of this side's records, where it is not the claim's."""
    settings: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Fields of the fingerprint that this side has in place of the published ones, such as a precision."""

    def __str__(self) -> str:
        own = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        named = f"{self.gpu} with {self.stack}" if self.stack else self.gpu
        return f"{named}, {own}" if own else named


class RecordClaim(RestatedStatement):
    """A published ratio, or mean of ratios, that no one run can give: of two GPUs, or of two stacks."""

    kind: ClassVar[str] = "between records"
    unit: ClassVar[str] = RATIO
    between: ClassVar[None] = None
    hardware: ClassVar[None] = None
    """Each side has its own."""
    point: str
    """The point that every record has."""
    over: ClaimSide
    under: ClaimSide
    mean_over: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """One setting, such as the model, and its values: each side has a record of each; where it is empty, one
    record."""
    value: Annotated[float, Field(gt=0)]
    better: Literal["higher", "lower"]
    """Direction of goodness, that of the metric."""

    @model_validator(mode="after")
    def _complete(self) -> RecordClaim:
        several = len(self.mean_over) > 1 or not all(self.mean_over.values())
        same = self.over == self.under
        named = "`mean_over` names one setting and its values"
        _refuse(self.id, (same, "`over` and `under` are one side"), (several, named))
        return self

    @property
    def setting(self) -> str | None:
        """Name of what differs between the records of a side; None where a side has one."""
        return next(iter(self.mean_over), None)

    @property
    def values(self) -> tuple[str, ...]:
        """The settings that the mean is over; where a side has one record, its point."""
        return self.mean_over[self.setting] if self.setting else (self.point,)


class ScoreDifferenceClaim(PublishedStatement):
    """What is said of the mean scores of two models; judged on the scores of both on the same documents."""

    over: str
    """The model whose mean is taken: B of `invoke compare --scores A B`."""
    under: str
    """The model whose mean is taken from it: A."""
    rules: dict[str, str] = Field(default_factory=dict)
    """Tasks of the mean, each with its rule; where the publication names none, those that the files have."""
    direction: Literal["above", "within"]
    """`above`: the difference is surely more than 0, and at most the margin below `value`. `within`: it lies
    surely inside the margin around 0."""
    value: Annotated[float, Field(ge=0, lt=1)]
    """Published difference of the means; 0 where the publication calls them the same."""
    margin: Annotated[float, Field(gt=0, lt=1)]
    """In scores, as `value`."""
    fails_when: Counterexample
    """A difference that fails it; the tests judge it."""

    @model_validator(mode="after")
    def _is_failed_by_its_counterexample(self) -> ScoreDifferenceClaim:
        above, found = self.direction == "above", self.fails_when
        limit = self.value - self.margin if above else self.margin
        passes = found.value >= limit if above else found.value <= limit
        derived = math.isclose(found.value, found.derived, rel_tol=ROUNDING)
        _refuse(
            self.id,
            (passes, f"its counterexample passes, the limit is {limit:g}"),
            (not near(found.value, limit), f"its counterexample is far from the limit of {limit:g}"),
            (not derived, "the counterexample is not what its derivation gives"),
        )
        return self
