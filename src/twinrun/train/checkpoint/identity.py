"""Which run a checkpoint is of, and how its work was split."""

from __future__ import annotations

from collections.abc import Mapping

from twinrun.checkpoints.manifest import CheckpointManifest
from twinrun.checkpoints.verification import demand_same_run
from twinrun.protocol.training import TrainingJob, identity
from twinrun.train.corpus import Corpus

# Settings of a training that change how a step is computed, and at most its rounding.
LAYOUT = ("reduction", "attention", "activation_checkpointing", "trainer", "compile")


def identity_of(job: TrainingJob, corpus: Corpus) -> dict[str, str]:
    """Return what decides the loss: model, data, its order and the optimizer."""
    return {
        **identity(job.shape, job.training),
        "data": corpus.sha256,
        "tokenizer": corpus.origin.tokenizer_sha256 or corpus.origin.source,
    }


def weights_alone(manifest: CheckpointManifest) -> bool:
    """Say whether a checkpoint has no state of an optimizer and no steps that are done."""
    return manifest.step == 0


def layout_of(job: TrainingJob) -> dict[str, str]:
    """Return how the work is split over ranks and passes."""
    return {
        "world_size": str(job.world_size),
        "sharding": job.sharding,
        "microbatch": str(job.microbatch),
        **{name: str(getattr(job.training, name)) for name in LAYOUT},
        **({"layout": job.layout.model_dump_json(exclude_defaults=True)} if job.layout else {}),
    }


def check_allowed(
    manifest: CheckpointManifest,
    identity: Mapping[str, str],
    layout: Mapping[str, str],
    *,
    mode: str,
    place: str,
) -> None:
    """Refuse to go on from the checkpoint of another run, or of another layout where that must be the same.

    Weights alone, which a conversion has made, only must be of the same model.

    Raises:
        InputError: names the first field that differs, and both sides.
    """
    if weights_alone(manifest):
        ours = {name: identity.get(name, "nothing") for name in manifest.identity}
        demand_same_run(manifest.identity, ours, "the weights are of another model", place=place)
        return
    # Fields added since the checkpoint was saved take their "absent" value.
    missing = {name: "None" for name in identity if name.startswith("shape.")}
    demand_same_run(
        {**missing, **manifest.identity}, identity, "the checkpoint is of another run", place=place
    )
    if mode == "bounded":
        return
    # Older checkpoints name a way of summing that every run has now.
    theirs = {
        name: value for name, value in manifest.layout.items() if (name, value) != ("summation", "fast")
    }
    hint = "`--checkpoint mode=bounded` goes on with another layout, inside an envelope of the loss"
    demand_same_run(theirs, layout, "the checkpoint was saved with another layout", place=place, hint=hint)
