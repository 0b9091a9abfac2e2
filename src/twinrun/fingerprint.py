"""The configuration of a run in the terms a publication states it, compared before any time is spent."""

from __future__ import annotations

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
