"""The configuration of a run in the terms a publication states it, compared before any time is spent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from twinrun.claims import Accepted
from twinrun.formulas import parameters
from twinrun.manifest import Frozen
from twinrun.training import ModelShape, Training

Value = str | int | bool
Fingerprint = dict[str, Value]


class Difference(Frozen):
    """A field in which the run is not the published configuration."""

    field: str
    found: Value
    published: Accepted


def nearest(
    cases: Iterable[Mapping[str, Accepted]], published: dict[str, Accepted]
) -> tuple[Fingerprint, tuple[Difference, ...]]:
    """Return the published fields as the nearest of `cases` has them, and where that differs."""
    # A list in a case is what it goes through, no mark of what it is.
    marks = [
        {field: value for field in published if not isinstance(value := case.get(field, ()), tuple)}
        for case in cases
    ]
    closest = min(marks, key=lambda one: len(differences(one, published)))
    return closest, differences(closest, published)


def fingerprint(shape: ModelShape, training: Training) -> Fingerprint:
    """Return the fields that decide whether two runs are the same experiment.

    `parameters` comes from the closed form; the ranks count them again on the meta device.
    """
    return {
        "parameters": parameters(shape),
        "vocabulary": shape.vocabulary,
        "sequence": shape.sequence,
        "global_batch": training.global_batch,
        "tokens_per_step": training.global_batch * shape.sequence,
        "precision": training.precision,
        "attention": training.attention,
        "sharding": training.sharding,
        "activation_checkpointing": training.activation_checkpointing,
    }


def differences(found: Fingerprint, published: dict[str, Accepted]) -> tuple[Difference, ...]:
    """List the published fields that `found` does not have, in the published order."""
    return tuple(
        Difference(field=field, found=found.get(field, "not recorded"), published=accepted)
        for field, accepted in published.items()
        if found.get(field) not in (accepted if isinstance(accepted, tuple) else (accepted,))
    )
