"""Settings as flat names and texts, what a change of one does, and where they are not the published ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.published import Accepted

Grade = Literal["large", "some", "small", "none"]
# Found value of a published field that a run does not have.
NOT_RECORDED = "not recorded"
# Value of a field that only one of two configurations has.
ABSENT = "none"
Value = str | int | float | bool
# The configuration of a run in the terms a publication states it, compared before any time is spent.
Fingerprint = dict[str, Value]


class Factor(NamedTuple):
    """A setting or circumstance, and what a change of it is likely to do."""

    pattern: str
    """Shell pattern over names."""
    speed: Grade
    numerics: Grade
    because: str


class Difference(Frozen):
    """A field in which the run is not the published configuration."""

    field: str
    found: Value
    published: Accepted
    stated: bool = True
    """Whether the publication says it; else it is what recipe.toml has, and the publication is silent."""

    def __str__(self) -> str:
        """Say what the run has, and who says otherwise."""
        if self.stated:
            return f"{self.field} is {self.found}, published {self.published}"
        return f"{self.field} is {self.found}, the recipe's {self.published} (the publication is silent)"


@dataclass(frozen=True, kw_only=True)
class PointSettings:
    """What decides a point of a workload."""

    of: Callable[[Any, Any], Fingerprint]
    """Return every setting that decides what a point measures, by name, from a plan's part and the point."""
    as_written: Callable[[Any, Any, Any, str], tuple[Any, Any]]
    """Return a plan's part and a point as recipe.toml has them at the paper scale: of the model that the plan
    names, and of the case or layout that the name of a point says."""


def differences(
    found: Fingerprint,
    published: Mapping[str, Accepted],
    *,
    written: Fingerprint | None = None,
    older: bool = False,
) -> tuple[Difference, ...]:
    """List the fields that `found` does not have as published, in the published order, then the others.

    Args:
        written: every field as recipe.toml has it, which counts wherever the publication is silent; one that
            `found` does not have is absent, not wrong.
        older: `found` is of an older version of the recipe, whose further fields say nothing.
    """
    silent = {field: value for field, value in (written or {}).items() if field in found}
    if written and not older:
        silent |= {field: ABSENT for field in found if field not in written}
    return tuple(
        Difference(field=field, found=found.get(field, NOT_RECORDED), published=accepted, stated=stated)
        for fields, stated in ((published, True), (silent, False))
        for field, accepted in fields.items()
        if stated or field not in published
        if not _accepts(accepted, found.get(field, NOT_RECORDED))
    )


def _accepts(accepted: Accepted, found: Value) -> bool:
    """Say whether a value is one of the accepted ones; true is no number."""
    among = accepted if isinstance(accepted, tuple) else (accepted,)
    return any(one == found and isinstance(one, bool) == isinstance(found, bool) for one in among)


def nearest(cases: Iterable[Mapping[str, Accepted]], published: Mapping[str, Accepted]) -> Fingerprint:
    """Return the published fields as the nearest of `cases` has them."""
    # A list in a case is what it goes through, no field of its configuration.
    marks = [
        {field: value for field in published if not isinstance(value := case.get(field, ()), tuple)}
        for case in cases
    ]
    return min(marks, key=lambda one: len(differences(one, published)))


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is no table, by its dotted name."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def as_fingerprint(values: Mapping[str, Any], prefix: str = "") -> Fingerprint:
    """Return values by name, a list as one text, what is not given as `none`."""
    return {name: ABSENT if one is None else _as_value(one) for name, one in leaves(values, prefix)}


def flat_fields(model: Frozen, prefix: str = "") -> Fingerprint:
    """Return every field of `model` by its dotted name; a list as one text, what is not given as `none`."""
    return as_fingerprint(model.model_dump(mode="json"), prefix)


def flat(model: Frozen, prefix: str = "") -> dict[str, str]:
    """Return the fields of `model` that are set as text, with dotted names for nested ones."""
    given = leaves(model.model_dump(mode="json", exclude_none=True), prefix)
    return {name: str(_as_value(one)) for name, one in given}


def _as_value(one: Any) -> Value:
    return ", ".join(map(str, one)) if isinstance(one, (list, tuple)) else one
