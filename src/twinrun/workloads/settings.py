"""Settings as flat names and texts, what a change of one does, and where they are not the published ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.published import Accepted

Grade = Literal["large", "some", "small", "none"]
# Found value of a published field that a run does not have.
NOT_RECORDED = "not recorded"
Value = str | int | float | bool
# The configuration of a run in the terms a publication states it, compared before any time is spent.
Fingerprint = dict[str, Value]


class Factor(Frozen):
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


def differences(found: Fingerprint, published: Mapping[str, Accepted]) -> tuple[Difference, ...]:
    """List the published fields that `found` does not have, in the published order."""
    return tuple(
        Difference(field=field, found=found.get(field, NOT_RECORDED), published=accepted)
        for field, accepted in published.items()
        if found.get(field) not in (accepted if isinstance(accepted, tuple) else (accepted,))
    )


def nearest(cases: Iterable[Mapping[str, Accepted]], published: Mapping[str, Accepted]) -> Fingerprint:
    """Return the published fields as the nearest of `cases` has them."""
    # A list in a case is what it goes through, no field of its configuration.
    marks = [
        {field: value for field in published if not isinstance(value := case.get(field, ()), tuple)}
        for case in cases
    ]
    return min(marks, key=lambda one: len(differences(one, published)))


def factor(pattern: str, speed: Grade, numerics: Grade, because: str) -> Factor:
    """Return a factor; positional, because factors stand in tables."""
    return Factor(pattern=pattern, speed=speed, numerics=numerics, because=because)


def flat(model: Frozen) -> dict[str, str]:
    """Return the fields of `model` that are set as text, with dotted names for nested ones."""
    return dict(_leaves(model.model_dump(mode="json", exclude_none=True)))


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
