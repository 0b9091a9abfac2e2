"""published.toml: everything that a publication gives.

Statements that differ in a few words and numbers, such as the rows of a table, may stand as a family.
"""

from __future__ import annotations

import csv
import string
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import is_file_in
from twinrun.foundation.manifest import Frozen, read_toml, validate
from twinrun.manifests.claims import Claim, RecordClaim, ScoreDifferenceClaim
from twinrun.manifests.restatements import Source
from twinrun.manifests.settings import value_of
from twinrun.protocol.measurements import Per

Accepted = str | int | float | bool | tuple[str | int | float | bool, ...]
# Lists in which a family may stand for its rows.
FAMILIES = ("claim", "between_records", "score_difference", "reference")
# Field of a fingerprint that has the rule of a task.
RULE = "evaluation.rule."
_NUMBERS: tuple[str, ...] = ("cards", "value")
_SOURCE_KEYS: tuple[str, ...] = ("document", "where", "how", "derivation")


def accepted_rows(published: Mapping[str, Accepted], key: str = "parameters") -> list[dict[str, Accepted]]:
    """Return the configurations that lists stand for: those as long as that of `key` are read beside it."""
    keyed = published.get(key)
    if not isinstance(keyed, tuple):
        return [dict(published)]
    listed = {name for name, one in published.items() if isinstance(one, tuple) and len(one) == len(keyed)}
    rows = zip(*(published[name] for name in listed), strict=True)
    return [{**published, **dict(zip(listed, row, strict=True))} for row in rows]


class Family(Frozen):
    """A template and its rows."""

    columns: tuple[str, ...]
    """Names of the values of a row."""
    rows: tuple[tuple[Any, ...], ...]
    """One statement each; after the values a row may have a table of keys that its statement alone has."""
    each: dict[str, Any]
    """The statement. `{column}` in a text or a key is the row's value as Python formats it,
    `{column:percent}` a share in percent; a text that is `{column}` alone is the value itself."""


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "percent":
            return f"{value * 100:.4g} %"
        return str(super().format_field(value, format_spec))


_FORMATTER = _Formatter()


def _or_families(schema: dict[str, Any]) -> None:
    """Let a list have families too, as the file may."""
    schema["items"] = {"anyOf": [schema["items"], Family.model_json_schema()]}


Item = TypeVar("Item")
Listed = Annotated[tuple[Item, ...], Field(json_schema_extra=_or_families)]


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
    claim: Listed[Claim] = ()
    between_records: Listed[RecordClaim] = ()
    """Claims that `invoke compare --claims` judges."""
    nowhere: dict[str, str] = Field(default_factory=dict)
    """Stacks that sides of claims name and images/stacks/ lacks, each with the reason: as published nobody
    can ask such a claim here."""
    score_difference: Listed[ScoreDifferenceClaim] = ()
    """Claims that `invoke compare --scores` judges."""
    references: str | None = None
    """CSV file of the folder with the columns of `reference` and of its source, for long tables."""
    reference: Listed[Reference] = ()
    missing: dict[str, str] = Field(default_factory=dict)
    """What the publication does not give, each with the reason."""

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
    return published_of(content, place=str(path))


def published_of(content: dict[str, Any], *, place: str) -> PublishedClaims:
    """Return what the parsed `published.toml` says, its families written out; raises InputError."""
    listed = {key: content[key] for key in FAMILIES if isinstance(content.get(key), list)}
    whole = {key: list(expanded(entries, place=f"{place}:{key}")) for key, entries in listed.items()}
    return validate({**content, **whole}, PublishedClaims, place=place)


def expanded(entries: Iterable[Any], *, place: str) -> Iterator[Any]:
    """Yield statements as they are, and those that families give; raises InputError with the row."""
    for number, entry in enumerate(entries):
        where = f"{place}.{number}"
        if not isinstance(entry, dict) or not Family.model_fields.keys() & entry.keys():
            yield entry
            continue
        family = validate(entry, Family, place=where)
        try:
            names = set(_names_in(family.each))
        except ValueError as error:
            raise InputError(f"not a template: {error}", place=f"{where}.each") from None
        if odd := names ^ set(family.columns):
            raise InputError("columns and template differ", place=where, found=", ".join(sorted(odd)))
        for row_number, row in enumerate(family.rows):
            try:
                filled = _filled(family.each, dict(zip(family.columns, row, strict=False)))
                yield _joined(filled, dict(*row[len(family.columns) :]))
            except (KeyError, ValueError, TypeError) as error:
                place, message = f"{where}.rows.{row_number}", f"not a row of this family: {error}"
                allowed = f"{', '.join(family.columns)}, and a table of further keys"
                raise InputError(message, place=place, found=list(row), allowed=allowed) from None


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(template, dict):
        return {_filled(key, values): _filled(inner, values) for key, inner in template.items()}
    if isinstance(template, list):
        return [_filled(one, values) for one in template]
    if not isinstance(template, str):
        return template
    whole = template.startswith("{") and template[1:-1] in values
    return values[template[1:-1]] if whole else _FORMATTER.vformat(template, (), values)


def _names_in(template: Any) -> Iterator[str]:
    if isinstance(template, str):
        yield from (name for _, name, _, _ in _FORMATTER.parse(template) if name is not None)
    elif isinstance(template, (dict, list)):
        for one in [*template, *template.values()] if isinstance(template, dict) else template:
            yield from _names_in(one)


def _joined(statement: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a statement with the keys of its row, table by table."""
    for key, value in own.items():
        statement[key] = _joined(inner, value) if isinstance(inner := statement.get(key), dict) else value
    return statement


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
