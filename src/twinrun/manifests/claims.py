"""Published numbers as data: what is claimed, for which hardware, and who says so."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen, read_toml, validate
from twinrun.manifests.metrics import RATIO, Metric, known_metric
from twinrun.manifests.metrics import demand as _demand
from twinrun.manifests.record_claims import RecordClaim
from twinrun.manifests.reference_table import read_rows
from twinrun.manifests.restatements import Restatement, RestatementTerms, check_restatement, demand_resolution
from twinrun.manifests.source import Source
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.formulas import FORMULAS
from twinrun.protocol.measurements import Per

Kind = Literal["absolute", "ratio", "invariant", "parity"]


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
    """As far as the publication names it."""


class Claim(Frozen):
    """One checkable statement of the publication; its unit, direction and what it counts are its metric's."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    statement: str
    """The claim in one sentence."""
    kind: Kind
    metric: str
    """Row of recipes/metrics.toml."""
    unit: str
    """Of the metric, or `ratio` for a ratio of two points."""
    per: Per
    """What one published number counts: a card of two dies is two devices."""
    formula: str | None = None
    """Identifier in the formulas; required where the metric has any."""
    point: str | None = None
    """The point an absolute value belongs to."""
    measurement: str | None = None
    """Which measurement of the point, where its metric has several."""
    between: tuple[str, str] | None = None
    """Points of a ratio, the first over the second, or the two of a parity, else of all whole curves."""
    value: float
    """For an invariant and a parity the expected distance, 0."""
    better: Literal["higher", "lower", "equal"]
    """Direction of goodness, that of the metric: a run that is worse by more than the tolerance fails."""
    tolerance: Annotated[float, Field(gt=0, lt=1)]
    """Relative to `value`; of an invariant the largest difference, of a parity the widest envelope."""
    because: str
    """Why this tolerance."""
    hardware: PublishedHardware | None = None
    source: Source
    here: Restatement | None = None
    """What it says where the published hardware or scale is not."""
    why_none: str | None = None
    """Why there is no restatement, where there is none."""

    @model_validator(mode="after")
    def _complete(self) -> Claim:
        needed = {
            "absolute": ("point", "hardware"),
            "ratio": ("between",),
            "invariant": (),
            "parity": (),
        }[self.kind]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"claim `{self.id}` of kind `{self.kind}` also needs: {', '.join(missing)}")
        if self.between and self.between[0] == self.between[1]:
            raise ValueError(f"claim `{self.id}`: `between` names one point twice")
        if self.is_distance != (self.better == "equal"):
            raise ValueError(f"claim `{self.id}`: `better` is `equal` for invariants and parities alone")
        if self.is_distance and self.value != 0:
            raise ValueError(f"claim `{self.id}`: the expected distance of an {self.kind} is 0")
        if not self.is_distance and self.value <= 0:
            raise ValueError(f"claim `{self.id}`: `value` must be positive, found {self.value:g}")
        if (self.here is None) == (self.why_none is None):
            raise ValueError(f"claim `{self.id}` needs either a table `here` or a reason `why_none`")
        return self

    @property
    def is_distance(self) -> bool:
        """Whether curves or values are held against each other, instead of against a number."""
        return self.kind in ("invariant", "parity")


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
    metric: str
    """Row of recipes/metrics.toml."""
    unit: str
    per: Per
    formula: str | None = None
    precision: str = "bf16"
    """Of the matrix products; a share of the bf16 peak is given of bf16 alone."""
    gpu: str
    source: Source


Accepted = str | int | bool | tuple[str | int | bool, ...]


class PublishedClaims(Frozen):
    """published.toml: everything the publication gives, and what it does not."""

    fingerprint: dict[str, Accepted]
    """The published configuration; a list means that any of its values is the published one."""
    claim: tuple[Claim, ...]
    between_records: tuple[RecordClaim, ...] = ()
    """Claims that `invoke compare --claims` judges."""
    references: str | None = None
    """CSV file of the folder with the columns of `reference` and of its source, for long tables."""
    reference: tuple[Reference, ...] = ()
    missing: tuple[Missing, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> PublishedClaims:
        names = [claim.id for claim in self.claim] + [claim.id for claim in self.between_records]
        if len(names) != len(set(names)):
            raise ValueError("two claims have the same id")
        return self


def load_published(folder: Path) -> PublishedClaims:
    """Read `published.toml` of the recipe in `folder`; raises InputError."""
    path = folder / "published.toml"
    content = read_toml(path)
    if file := content.get("references"):
        content["reference"] = [*content.get("reference", []), *read_rows(folder, str(file))]
    return validate(content, PublishedClaims, place=str(path))


def check_numbers(
    published: PublishedClaims, *, place: str, metrics: dict[str, Metric], gpus: dict[str, Gpu]
) -> None:
    """Hold every published number against its metric and its GPU; raises InputError with file and key."""
    for number, claim in enumerate(published.claim):
        where = f"{place}:claim.{number}"
        metric = _metric_of(claim, where, metrics)
        if not claim.is_distance:
            _demand(claim.better, [metric.better], place=f"{where}.better", what=f"direction of {metric.id}")
        if claim.hardware:
            _demand(claim.hardware.gpu, gpus, place=f"{where}.hardware.gpu", what="GPU")
        units = [RATIO] if claim.kind == "ratio" else [metric.unit, *metric.units]
        _demand(claim.unit, units, place=f"{where}.unit", what=f"unit of {metric.id}")
        if claim.kind == "ratio":
            demand_resolution(claim.tolerance, claim.value, place=f"{where}.tolerance")
        if claim.here:
            terms = RestatementTerms(claim.kind, claim.formula, claim.tolerance, tuple(published.fingerprint))
            check_restatement(claim.here, terms, place=f"{where}.here", metrics=metrics)
    for number, between in enumerate(published.between_records):
        where = f"{place}:between_records.{number}"
        _check_between(between, tuple(published.fingerprint), where, metrics, gpus)
    for number, reference in enumerate(published.reference):
        where = f"{place}:reference.{number}"
        metric = _metric_of(reference, where, metrics)
        _demand(
            reference.unit, [metric.unit, *metric.units], place=f"{where}.unit", what=f"unit of {metric.id}"
        )
        _demand(reference.gpu, gpus, place=f"{where}.gpu", what="GPU")


def _check_between(
    claim: RecordClaim, fields: tuple[str, ...], where: str, metrics: dict[str, Metric], gpus: dict[str, Gpu]
) -> None:
    metric = _metric_of(claim, where, metrics)
    _demand(claim.better, [metric.better], place=f"{where}.better", what=f"direction of {metric.id}")
    for name, side in (("over", claim.over), ("under", claim.under)):
        _demand(side.gpu, gpus, place=f"{where}.{name}.gpu", what="GPU")
    if claim.here is None:
        return
    terms = RestatementTerms("ratio of records", claim.formula, claim.tolerance, fields)
    check_restatement(claim.here, terms, place=f"{where}.here", metrics=metrics)
    demand_resolution(claim.here.tolerance, claim.here.value, place=f"{where}.here.tolerance")
    vendors = [gpus[side.gpu].vendor for side in (claim.over, claim.under)]
    if vendors[0] == vendors[1]:
        raise InputError(
            "nothing tells the sides apart on other GPUs",
            place=f"{where}.here",
            found=f"both sides of {vendors[0]}",
            allowed="sides of two vendors",
            hint="say in `why_none` why there is no restatement",
        )


def _metric_of(number: Claim | RecordClaim | Reference, where: str, metrics: dict[str, Metric]) -> Metric:
    metric = known_metric(number.metric, metrics, place=f"{where}.metric")
    _demand(number.per, metric.per, place=f"{where}.per", what=f"what {metric.id} is counted per")
    if number.formula is not None or metric.formulas:
        _demand(number.formula, metric.formulas, place=f"{where}.formula", what=f"formula of {metric.id}")
        _demand(number.formula, FORMULAS, place=f"{where}.formula", what="formula")
    return metric
