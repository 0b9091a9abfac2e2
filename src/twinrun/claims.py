"""Published numbers as data: what is claimed, for which hardware, and who says so."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinrun.manifest import Frozen, load_toml

Kind = Literal["absolute", "ratio", "invariant"]


class Source(Frozen):
    """Where a number stands and how it was read."""

    document: str
    """Key of the publication, see the recipe's README."""
    where: str
    """Table, figure or sentence."""
    how: Literal["read from text", "read from a table", "digitised", "derived", "implied"]
    derivation: str | None = None
    """For derived and implied values: from what."""


class Hardware(Frozen):
    """What a published number was measured on."""

    gpu: str
    """Row of images/gpus.toml."""
    cards: Annotated[int, Field(gt=0)]
    """Cards over all nodes; one card may be several devices."""
    nodes: Annotated[int, Field(gt=0)]
    devices: Annotated[int, Field(gt=0)] | None = None
    """Devices used, where that is not all of the cards: a die of one that has two."""
    software: str
    """As far as the publication names it."""


class Claim(Frozen):
    """One checkable statement of the publication."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    statement: str
    """The claim in one sentence."""
    kind: Kind
    metric: Literal["model-flops", "tokens-per-second", "loss", "time"]
    unit: Literal["TFLOP/s", "tokens/s", "ratio", "nats/token", "ms"]
    per: Literal["card", "device", "run"]
    """What one published number counts: a card of two dies is two devices."""
    formula: str | None = None
    """Identifier in twinrun.formulas; required for FLOP."""
    point: str | None = None
    """The point an absolute value belongs to: of the sweep, or a case of the benchmark."""
    measurement: str | None = None
    """What of that case is timed."""
    between: tuple[str, str] | None = None
    """Points of a ratio: the first over the second."""
    value: float
    """For an invariant the expected largest relative difference, 0."""
    better: Literal["higher", "lower", "equal"]
    """Direction of goodness: a run that is worse by more than the tolerance fails."""
    tolerance: Annotated[float, Field(gt=0, lt=1)]
    """Relative to `value`; for `equal` the largest relative difference."""
    because: str
    """Why this tolerance."""
    hardware: Hardware | None = None
    source: Source

    @model_validator(mode="after")
    def _complete(self) -> Claim:
        needed = {
            "absolute": ("point", "hardware"),
            "ratio": ("between",),
            "invariant": (),
        }[self.kind]
        missing = [name for name in needed if getattr(self, name) is None]
        if self.metric == "model-flops" and self.formula is None:
            missing.append("formula")
        if self.metric == "time" and self.measurement is None:
            missing.append("measurement")
        if missing:
            raise ValueError(f"claim `{self.id}` of kind `{self.kind}` also needs: {', '.join(missing)}")
        if (self.kind == "invariant") != (self.better == "equal"):
            raise ValueError(f"claim `{self.id}`: `better` is `equal` for invariants, and only for them")
        if (self.metric == "time") != (self.unit == "ms"):
            raise ValueError(f"claim `{self.id}`: a time is in `ms`, and only a time")
        # A slower run must never pass: no publication may turn the direction round.
        if self.metric == "time" and (self.kind, self.better, self.per) != ("absolute", "lower", "device"):
            raise ValueError(f"claim `{self.id}`: a time is absolute, of a device, and `lower` is better")
        return self


class Missing(Frozen):
    """Something the publication does not give."""

    what: str
    why: str


class Reference(Frozen):
    """A published point drawn for orientation; nothing is judged against it."""

    label: str
    cards: Annotated[int, Field(gt=0)]
    model: str
    value: Annotated[float, Field(gt=0)]
    unit: Literal["TFLOP/s", "tokens/s"]
    per: Literal["card", "device"]
    formula: str | None = None
    gpu: str
    source: Source


Accepted = str | int | bool | tuple[str | int | bool, ...]


class Published(Frozen):
    """published.toml: everything the publication gives, and what it does not."""

    fingerprint: dict[str, Accepted]
    """The published configuration; a list means that any of its values is the published one."""
    claim: tuple[Claim, ...]
    reference: tuple[Reference, ...] = ()
    missing: tuple[Missing, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> Published:
        names = [claim.id for claim in self.claim]
        if len(names) != len(set(names)):
            raise ValueError("two claims have the same id")
        return self


def load_published(folder: Path) -> Published:
    """Read `published.toml` of the recipe in `folder`; raises InputError."""
    return load_toml(folder / "published.toml", Published)
