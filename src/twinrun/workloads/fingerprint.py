"""The configuration of a run in the terms a publication states it, compared before any time is spent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.published import Accepted

Value = str | int | bool
Fingerprint = dict[str, Value]


class Difference(Frozen):
    """A field in which the run is not the published configuration."""

    field: str
    found: Value
    published: Accepted


def differences(found: Fingerprint, published: Mapping[str, Accepted]) -> tuple[Difference, ...]:
    """List the published fields that `found` does not have, in the published order."""
    return tuple(
        Difference(field=field, found=found.get(field, "not recorded"), published=accepted)
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
