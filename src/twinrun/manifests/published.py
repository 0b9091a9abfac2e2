"""published.toml: everything that a publication gives, read and held against metrics and GPUs."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import is_file_in
from twinrun.foundation.manifest import Frozen, read_toml, validate
from twinrun.manifests.claims import Claim, RecordClaim, ScoreDifferenceClaim
from twinrun.manifests.metrics import RATIO, Metric, demand, demand_possible, known_metric
from twinrun.manifests.restatements import RestatementTerms, Source, check_restatement, demand_resolution
from twinrun.manifests.settings import value_of
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.formulas import FORMULAS
from twinrun.protocol.measurements import Per

Accepted = str | int | float | bool | tuple[str | int | float | bool, ...]
# Field of a fingerprint that has the rule of a task.
RULE = "evaluation.rule."
_NUMBERS: tuple[str, ...] = ("cards", "value")
_SOURCE_KEYS: tuple[str, ...] = ("document", "where", "how", "derivation")
# A file of a public repository at one commit.
_PINNED = re.compile(r"github:[\w.-]+/[\w.-]+@[0-9a-f]{7,40}:\S+")


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
    """Type of the matrix products; only bf16 has a share of the bf16 peak."""
    gpu: str
    source: Source


class Neutral(Frozen):
    """Settings that do not change what claims say, and why; every setting without a row counts."""

    fields: Annotated[tuple[str, ...], Field(min_length=1)]
    """Fields of a fingerprint, or groups of them: `data` stands for all whose names begin with `data.`."""
    claims: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Shell patterns over the ids of claims."""
    where: Literal["anywhere", "here"] = "anywhere"
    """`here`: only where a claim is judged away from the published run, and nothing is called reproduced."""
    because: str


class PublishedClaims(Frozen):
    """published.toml: everything the publication gives, and what it does not."""

    fingerprint: dict[str, Accepted]
    """The published configuration; a list means that any of its values is the published one."""
    standing: dict[str, str] = Field(default_factory=dict)
    """Fields of the fingerprint that no run can have as published, such as a corpus that is not public,
    each with its reason."""
    neutral: tuple[Neutral, ...] = ()
    """What may differ from the published configuration, by claim."""
    configurations: dict[str, dict[str, Accepted]] = Field(default_factory=dict)
    """Fingerprints of models that scores are of, by the model's name."""
    claim: tuple[Claim, ...]
    between_records: tuple[RecordClaim, ...] = ()
    """Claims that `invoke compare --claims` judges."""
    nowhere: dict[str, str] = Field(default_factory=dict)
    """Stacks that sides of claims name and images/stacks/ lacks, each with the reason: as published nobody
    can ask such a claim here."""
    score_difference: tuple[ScoreDifferenceClaim, ...] = ()
    """Claims that `invoke compare --scores` judges."""
    references: str | None = None
    """CSV file of the folder with the columns of `reference` and of its source, for long tables."""
    reference: tuple[Reference, ...] = ()
    missing: tuple[Missing, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> PublishedClaims:
        ids = [claim.id for claim in self.claim] + [claim.id for claim in self.between_records]
        names = [*ids, *(claim.id for claim in self.score_difference)]
        if len(names) != len(set(names)):
            raise ValueError("two claims have the same id")
        patterns = [pattern for row in self.neutral for pattern in row.claims]
        if strange := [one for one in patterns if not any(fnmatchcase(name, one) for name in ids)]:
            raise ValueError(f"`neutral` is for no claim that there is: {', '.join(strange)}")
        sides = [side for claim in self.between_records for side in (claim.over, claim.under)]
        if strange := sorted(self.nowhere.keys() - {side.stack for side in sides}):
            raise ValueError(f"`nowhere` names a stack of no side: {', '.join(strange)}")
        if strange := sorted(self.standing.keys() - self.fingerprint.keys()):
            raise ValueError(f"`standing` names what the fingerprint lacks: {', '.join(strange)}")
        for claim in self.claim:
            if claim.configuration is not None and claim.configuration not in self.configurations:
                raise ValueError(f"claim `{claim.id}`: no `configurations.{claim.configuration}`")
        return self

    @property
    def restated(self) -> dict[str, Claim | RecordClaim]:
        """Claims that a metric is about, of one record and between records, by their ids."""
        every: tuple[Claim | RecordClaim, ...] = (*self.claim, *self.between_records)
        return {claim.id: claim for claim in every}

    def neutral_of(self, claim: str, *, here: bool) -> dict[str, str]:
        """Return what is neutral for the claim called `claim`, each field or group with the reason."""
        found = [row for row in self.neutral if here or row.where == "anywhere"]
        return {
            field: row.because
            for row in found
            if any(fnmatchcase(claim, pattern) for pattern in row.claims)
            for field in row.fields
        }

    def fingerprint_of(self, claim: Claim) -> dict[str, Accepted]:
        """Return the configuration that a claim is about."""
        if claim.configuration is None:
            return self.fingerprint
        if claim.kind != "score":
            return {**self.fingerprint, **self.configurations[claim.configuration]}
        rules = {f"{RULE}{task}": rule for task, rule in claim.rules.items()}
        return {**self.configurations[claim.configuration], **rules}


def load_published(folder: Path) -> PublishedClaims:
    """Read `published.toml` of the recipe in `folder`; raises InputError."""
    path = folder / "published.toml"
    content = read_toml(path)
    if file := content.get("references"):
        content["reference"] = [*content.get("reference", []), *_read_rows(folder, str(file))]
    return validate(content, PublishedClaims, place=str(path))


def check_sources(published: PublishedClaims, keys: Sequence[str], *, place: str) -> None:
    """Demand that every number cites a publication of the recipe or a pinned document; raises InputError.

    Args:
        keys: those of the recipe's publications.
    """
    restated = published.restated.values()
    named = [(f"claim {one.id}", one.source) for one in [*restated, *published.score_difference]]
    failing = [(one.id, one.here.fails_when) for one in restated if one.here]
    failing += [(one.id, one.fails_when) for one in published.score_difference]
    named += [(f"claim {name}, fails_when", one.source) for name, one in failing if one.source]
    named += [(f"reference {item.label}", item.source) for item in published.reference]
    for name, source in named:
        if source.document not in keys and not _PINNED.fullmatch(source.document):
            raise InputError(
                "a source is a publication of the recipe or a pinned document",
                place=f"{place}: {name}",
                found=source.document,
                allowed=[*keys, "github:OWNER/REPOSITORY@COMMIT:PATH"],
            )
        if source.how in ("derived", "implied") and not source.derivation:
            raise InputError(
                "what is derived or implied says from what", place=f"{place}: {name}", found=source.how
            )


def check_numbers(
    published: PublishedClaims, *, place: str, metrics: dict[str, Metric], gpus: dict[str, Gpu]
) -> None:
    """Hold every published number against its metric and its GPU; raises InputError with file and key."""
    for number, claim in enumerate(published.claim):
        where = f"{place}:claim.{number}"
        metric = _metric_of(claim, where, metrics)
        if claim.is_distance and claim.value and (metric.series or metric.fact):
            raise InputError(
                "a curve and a fact are held against each other, so the expected distance is 0",
                place=f"{where}.value",
                found=claim.value,
                allowed=0,
            )
        if not claim.is_distance and claim.better != "equal":
            demand(claim.better, [metric.better], place=f"{where}.better", what=f"direction of {metric.id}")
        if claim.hardware:
            demand(claim.hardware.gpu, gpus, place=f"{where}.hardware.gpu", what="GPU")
        units = [RATIO] if claim.kind == "ratio" else [metric.unit, *metric.units]
        demand(claim.unit, units, place=f"{where}.unit", what=f"unit of {metric.id}")
        if claim.kind == "parity" and (metric.series is None) == bool(claim.bounds):
            allowed = "a bound for each precision" if metric.series else "none: no control runs widen it"
            found = ", ".join(claim.bounds) or "none"
            raise InputError(
                "a parity of curves has bounds", place=f"{where}.bounds", found=found, allowed=allowed
            )
        if claim.kind != "ratio" and not claim.is_distance:
            limits = _limits(gpus[claim.hardware.gpu], claim.per) if claim.hardware else {}
            demand_possible(claim.value, metric, unit=claim.unit, limits=limits, place=f"{where}.value")
        if claim.kind == "ratio":
            demand_possible(claim.value, metric, unit=metric.unit, limits=None, place=f"{where}.value")
            demand_resolution(claim.tolerance, claim.value, place=f"{where}.tolerance")
        if claim.here:
            fields = tuple(published.fingerprint_of(claim))
            terms = RestatementTerms(claim.kind, claim.formula, claim.tolerance, fields)
            check_restatement(claim.here, terms, place=f"{where}.here", metrics=metrics)
            _check_neutral(published, claim, metrics[claim.here.metric], place=place)
    for number, between in enumerate(published.between_records):
        where = f"{place}:between_records.{number}"
        _check_between(between, tuple(published.fingerprint), where, metrics, gpus)
    for number, reference in enumerate(published.reference):
        where = f"{place}:reference.{number}"
        metric = _metric_of(reference, where, metrics)
        demand(
            reference.unit, [metric.unit, *metric.units], place=f"{where}.unit", what=f"unit of {metric.id}"
        )
        demand(reference.gpu, gpus, place=f"{where}.gpu", what="GPU")
        limits = _limits(gpus[reference.gpu], reference.per)
        demand_possible(reference.value, metric, unit=reference.unit, limits=limits, place=f"{where}.value")


def _check_neutral(published: PublishedClaims, claim: Claim, metric: Metric, *, place: str) -> None:
    """Refuse to call neutral what the metric of a restatement depends on; raises InputError."""
    if tied := [field for field in published.neutral_of(claim.id, here=True) if metric.decides(field)]:
        raise InputError(
            f"{metric.id} depends on this field, so it is not neutral for {claim.id}",
            place=f"{place}:neutral",
            found=", ".join(tied),
            allowed=f"what metrics.toml does not list under `depends_on` of {metric.id}",
        )


def _limits(gpu: Gpu, per: Per) -> dict[str, float]:
    """Return what a GPU does at most, by the names that evidence has for it; nothing of a node or a run."""
    cards = {"card": gpu.devices_per_card, "device": 1}.get(per)
    rates = {"peak": gpu.device_peak_flops / 1e12, "bandwidth": gpu.device_bandwidth_bytes_s / 1e9}
    return {name: cards * rate for name, rate in rates.items()} if cards else {}


def _check_between(
    claim: RecordClaim, fields: tuple[str, ...], where: str, metrics: dict[str, Metric], gpus: dict[str, Gpu]
) -> None:
    metric = _metric_of(claim, where, metrics)
    demand(claim.better, [metric.better], place=f"{where}.better", what=f"direction of {metric.id}")
    demand_possible(claim.value, metric, unit=metric.unit, limits=None, place=f"{where}.value")
    for name, side in (("over", claim.over), ("under", claim.under)):
        demand(side.gpu, gpus, place=f"{where}.{name}.gpu", what="GPU")
    if claim.here is None:
        return
    terms = RestatementTerms("ratio of records", claim.formula, claim.tolerance, fields)
    check_restatement(claim.here, terms, place=f"{where}.here", metrics=metrics)
    demand_resolution(claim.here.tolerance, claim.here.value, place=f"{where}.here.tolerance")
    vendors = [gpus[side.gpu].vendor for side in (claim.over, claim.under)]
    if vendors[0] == vendors[1] and claim.over.settings == claim.under.settings:
        raise InputError(
            "nothing tells the sides apart on other GPUs",
            place=f"{where}.here",
            found=f"both sides of {vendors[0]}",
            allowed="sides of two vendors, or with other settings",
            hint="say in `why_none` why there is no restatement",
        )


def _metric_of(number: Claim | RecordClaim | Reference, where: str, metrics: dict[str, Metric]) -> Metric:
    metric = known_metric(number.metric, metrics, place=f"{where}.metric")
    demand(number.per, metric.per, place=f"{where}.per", what=f"what {metric.id} is counted per")
    if number.formula is not None or metric.formulas:
        demand(number.formula, metric.formulas, place=f"{where}.formula", what=f"formula of {metric.id}")
        demand(number.formula, FORMULAS, place=f"{where}.formula", what="formula")
    return metric


def _read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows as `[[reference]]` has them; raises InputError where the folder has no such file."""
    if not is_file_in(folder, name):
        place = f"{folder / 'published.toml'}:references"
        raise InputError("no such file in the recipe's folder", place=place, found=name)
    with (folder / name).open(encoding="utf-8", newline="") as handle:
        return [_row(row) for row in csv.DictReader(handle)]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    filled = {key: value for key, value in row.items() if value}
    source = {key: filled.pop(key) for key in _SOURCE_KEYS if key in filled}
    numbers = {key: value_of(filled[key]) for key in _NUMBERS if key in filled}
    return {**filled, **numbers, "source": source}
