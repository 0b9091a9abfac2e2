"""A training run in the terms a publication states it: what decides whether two runs are one experiment."""

from __future__ import annotations

from collections.abc import Iterator

from twinrun.foundation.errors import InputError
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import DataSource, Optimizer, Training
from twinrun.workloads.settings import Fingerprint, Value, flat_fields
from twinrun.workloads.workload import Hardware

# The built-in corpus has these in place of a repository and a tokenizer.
BUILT_IN = {
    "repository": "the interpreter's standard library",
    "revision": "that of the interpreter",
    "tokenizer": "bytes",
}


# Fields of the tables that the fingerprint has in other words.
_IN_WORDS = dict.fromkeys(
    (
        *("data", "seed", "optimizer.betas", "optimizer.final_factor"),
        *("optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.schedule"),
        *("optimizer.schedule.warmup", "optimizer.schedule.total", "optimizer.schedule.decay"),
        *("model.vocabulary", "model.sequence", "model.dropout"),
        # Words of who says that the data is the published one.
        "data.source",
    )
)


def refuse_composer(training: Training, hardware: Hardware, *, table: str = "") -> None:
    """Raise InputError for a precision that Composer does not have on a processor.

    Args:
        table: of the settings that the training's are part of, with a dot.
    """
    if training.trainer == "composer" and training.precision != "fp32" and hardware.processor_alone:
        raise InputError(
            "Composer computes in fp32 on a CPU",
            place=f"--set {table}precision",
            found=training.precision,
            allowed="fp32",
            hint=f"--set {table}trainer=plain computes in bf16 and fp8 there too",
        )


def fingerprint(shape: AnyShape, training: Training, data: DataSource) -> Fingerprint:
    """Return the fields that decide whether two runs are the same experiment.

    Those that publications state have their words; every other field of the tables follows under its own
    name, so that what a table gains counts as well. A record holds the tables that this is computed from, so
    fields that the fingerprint has gained since are known of older records too.
    """
    stated: Fingerprint = {
        "parameters": shape.parameters(),
        "vocabulary": shape.vocabulary,
        "sequence": shape.sequence,
        "global_batch": training.global_batch,
        "tokens_per_step": training.global_batch * shape.sequence,
        "microbatch": training.microbatch,
        "precision": training.precision,
        "parameter_type": training.parameter_type,
        "attention": training.attention,
        "sharding": training.sharding,
        "activation_checkpointing": training.activation_checkpointing,
        "dropout": shape.dropout,
        "loss_function": _loss_function(training),
        **{f"data.{name}": value for name, value in _data(data, training.seed)},
        **{f"optimizer.{name}": value for name, value in _optimizer(training.optimizer)},
        **{f"schedule.{name}": value for name, value in _schedule(training.optimizer)},
    }
    others = {**flat_fields(training), **flat_fields(shape, "model."), **flat_fields(data, "data.")}
    return stated | {name: value for name, value in others.items() if name not in stated | _IN_WORDS}


def _loss_function(training: Training) -> str:
    weighting = training.position_weighting
    return "cross-entropy" + (f", weighted by position over {weighting:g}" if weighting else "")


def _data(source: DataSource, seed: int) -> Iterator[tuple[str, Value]]:
    yield "kind", source.kind
    for name in ("repository", "files", "revision", "tokenizer", "tokenizer_revision"):
        found = getattr(source, name)
        if value := BUILT_IN.get(name) if source.kind == "standard-library" else found:
            yield name, value
    yield "order_seed", seed


def _optimizer(optimizer: Optimizer) -> Iterator[tuple[str, Value]]:
    yield "name", "adamw"
    yield "learning_rate", optimizer.learning_rate
    yield from zip(("beta1", "beta2"), optimizer.betas, strict=True)
    yield "epsilon", optimizer.epsilon
    yield "weight_decay", optimizer.weight_decay
    yield "decayed", optimizer.decayed
    yield "gradient_clip", optimizer.gradient_clip


def _schedule(optimizer: Optimizer) -> Iterator[tuple[str, Value]]:
    if (tokens := optimizer.schedule) is not None:
        yield "kind", "warm-up, stable, decay"
        yield from (("warmup_tokens", tokens.warmup), ("decay_tokens", tokens.decay))
        yield "end_tokens", tokens.total
    elif optimizer.warmup_steps is not None and optimizer.decay_steps is not None:
        yield "kind", "cosine"
        yield from (("warmup_steps", optimizer.warmup_steps), ("end_steps", optimizer.decay_steps))
    yield "final_factor", optimizer.final_factor
