"""Which run a checkpoint is of, and how its work was split."""

from __future__ import annotations

from collections.abc import Mapping

from twinrun.checkpoints.manifest import Manifest
from twinrun.foundation.errors import InputError
from twinrun.protocol.training import TrainingJob
from twinrun.train.corpus import Corpus

# Settings of a training that change how a step is computed, and at most its rounding.
LAYOUT = ("reduction", "attention", "activation_checkpointing", "trainer", "compile")


def identity_of(job: TrainingJob, corpus: Corpus) -> dict[str, str]:
    """Return what decides the loss: model, data, its order and the optimizer."""
    training = job.training
    return {
        **{f"shape.{name}": str(value) for name, value in job.shape.model_dump().items()},
        **{f"optimizer.{name}": str(value) for name, value in training.optimizer.model_dump().items()},
        "precision": training.precision,
        "seed": str(training.seed),
        "global_batch": str(training.global_batch),
        "data": corpus.sha256,
        "tokenizer": corpus.origin.tokenizer_sha256 or corpus.origin.source,
    }


def layout_of(job: TrainingJob) -> dict[str, str]:
    """Return how the work is split over ranks and passes."""
    return {
        "world_size": str(job.world_size),
        "sharding": job.sharding,
        "microbatch": str(job.microbatch),
        **{name: str(getattr(job.training, name)) for name in LAYOUT},
    }


def check_allowed(
    manifest: Manifest, identity: Mapping[str, str], layout: Mapping[str, str], *, mode: str, place: str
) -> None:
    """Refuse to go on from the checkpoint of another run, or of another layout where that must be the same.

    Raises:
        InputError: names the first field that differs, and both sides.
    """
    _demand_same(manifest.identity, identity, "the checkpoint is of another run", place, hint=None)
    if mode == "exact":
        hint = "`--resume-mode bounded` goes on with another layout, inside an envelope of the loss"
        _demand_same(
            manifest.layout, layout, "the checkpoint was saved with another layout", place, hint=hint
        )


def _demand_same(
    theirs: Mapping[str, str], ours: Mapping[str, str], message: str, place: str, *, hint: str | None
) -> None:
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise InputError(
                message,
                place=f"{place}:{name}",
                found=theirs.get(name, "nothing"),
                allowed=f"{ours.get(name, 'nothing')}, that of this run",
                hint=hint,
            )
