"""What decides whether two training runs are one experiment, and what two of their points are compared by."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from twinrun.manifests.vendor import Gpu
from twinrun.predict.calibration import SOFTWARE, Run, Subject, basis
from twinrun.predict.parallel_layout import Machines
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import COMPOSER, PLAIN, DataSource, Optimizer, Training
from twinrun.workloads.curve_distance import ORDER
from twinrun.workloads.settings import Fingerprint, Value, factor, flat, flat_fields
from twinrun.workloads.training.estimates import parallel_layout
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint
from twinrun.workloads.training.numbers import CONTROL
from twinrun.workloads.training.points import trained
from twinrun.workloads.workload import ComparisonTerms, ControlledCurve, MeasuredPoint

# The built-in corpus has these in place of a repository and a tokenizer.
BUILT_IN = {
    "repository": "the interpreter's standard library",
    "revision": "that of the interpreter",
    "tokenizer": "bytes",
}
# Fields of the tables that the fingerprint has in other words, and who calls the data the published.
_IN_WORDS = {
    *("data", "seed", "optimizer.betas", "optimizer.final_factor"),
    *("optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.schedule"),
    *("optimizer.schedule.warmup", "optimizer.schedule.total", "optimizer.schedule.decay"),
    *("model.vocabulary", "model.sequence", "model.dropout", "data.source"),
}
# Largest difference of two kinds of hardware at the first step: 1, 2 and 4 H200s are by up to 3e-4 in bf16.
ROUNDING = {"fp32": 1e-6, "bf16": 1e-3}
# How a step is computed, not what: rounding aside, these leave the loss as it is.
ROUNDING_ONLY = {
    *("microbatch", "sharding", "attention", "activation_checkpointing", "compile", "warmup_steps"),
    *("reduction", "kernels", "layout", "controls"),
}
FACTORS = (
    factor("model", "large", "large", "arithmetic for each token, and the size of its matrices"),
    factor("shape.*", "some", "large", "part of the model"),
    factor("training.precision", "large", "some", "16 bits are several times faster and round more"),
    factor("training.fp8_recipe", "large", "some", "scales of tensors or of rows, and what stays in bf16"),
    factor("training.global_batch", "some", "large", "work between optimizer steps; another optimisation"),
    factor("training.activation_checkpointing", "large", "none", "a third more arithmetic"),
    factor("training.attention", "large", "small", "another kernel; `math` keeps the whole matrix"),
    factor("training.kernels", "large", "small", "another scan and convolution"),
    factor("training.layout", "some", "small", "another order in memory around the scan"),
    factor("training.parameter_type", "some", "large", "updates below 16 bits are lost"),
    factor("training.position_weighting", "none", "large", "another loss"),
    factor("training.trainer", "large", "small", "another training loop around the same model"),
    factor("training.controls", "none", "none", "the run itself stays as it is"),
    factor("training.compile", "large", "small", "compiled blocks fuse kernels"),
    factor("training.sharding", "some", "small", "gathers of parameters in every step"),
    factor("training.seed", "none", "large", "another initialisation and another order of the data"),
    factor("training.optimizer.*", "none", "large", "another optimisation"),
    factor("training.data", "none", "large", "other text"),
    factor("training.microbatch", "some", "small", "size of one forward pass"),
    factor("training.*", "small", "small", "length of the run and of its warm-up"),
    factor("microbatch", "some", "small", "size of one forward pass"),
    factor("attention backend", "some", "small", "another kernel for attention"),
    factor("layout.*", "large", "small", "another way to share the work"),
    factor("parallelism", "some", "small", "another exchange of gradients and parameters"),
    factor("data hash", "none", "large", "other tokens"),
    factor("order hash", "none", "large", "other samples in a step"),
    factor("data.*", "none", "large", "another source of tokens"),
)


def fingerprint(shape: AnyShape, training: Training, data: DataSource) -> Fingerprint:
    """Return the fields that decide whether two runs are the same experiment.

    Those that publications state have their words; every other field of the tables follows under its own
    name, so that what a table gains counts as well.
    """
    weighting, validation = training.position_weighting, training.validation
    same = ("microbatch", "precision", "parameter_type", "attention", "sharding", "activation_checkpointing")
    stated: Fingerprint = {
        "parameters": shape.parameters(),
        "vocabulary": shape.vocabulary,
        "sequence": shape.sequence,
        "global_batch": training.global_batch,
        "tokens_per_step": training.global_batch * shape.sequence,
        **{name: getattr(training, name) for name in same},
        "dropout": shape.dropout,
        "loss_function": "cross-entropy"
        + (f", weighted by position over {weighting:g}" if weighting else ""),
        **{f"data.{name}": value for name, value in _data(data, training.seed)},
        **({"validation.data": validation.data} if validation else {}),
        **({"validation.sequences": validation.sequences} if validation else {}),
        **dict(_optimizer(training.optimizer)),
    }
    others = {**flat_fields(training), **flat_fields(shape, "model."), **flat_fields(data, "data.")}
    return stated | {name: value for name, value in others.items() if name not in stated.keys() | _IN_WORDS}


def _data(source: DataSource, seed: int) -> Iterator[tuple[str, Value]]:
    yield "kind", source.kind
    for name in ("repository", "files", "revision", "tokenizer", "tokenizer_revision"):
        found = getattr(source, name)
        if value := BUILT_IN.get(name) if source.kind == "standard-library" else found:
            yield name, value
    if source.kind == "local" and source.sha256:
        yield "sha256", source.sha256
    for name in ("form", "column", "end"):
        if (given := getattr(source, name)) != type(source).model_fields[name].default:
            yield name, given
    yield "order_seed", seed


def _optimizer(optimizer: Optimizer) -> Iterator[tuple[str, Value]]:
    yield "optimizer.name", "adamw"
    yield "optimizer.learning_rate", optimizer.learning_rate
    yield from zip(("optimizer.beta1", "optimizer.beta2"), optimizer.betas, strict=True)
    for name in ("epsilon", "weight_decay", "decayed", "gradient_clip"):
        yield f"optimizer.{name}", getattr(optimizer, name)
    if (tokens := optimizer.schedule) is not None:
        yield "schedule.kind", "warm-up, stable, decay"
        for name, count in (("warmup", tokens.warmup), ("decay", tokens.decay), ("end", tokens.total)):
            yield f"schedule.{name}_tokens", count
    elif optimizer.warmup_steps is not None and optimizer.decay_steps is not None:
        yield "schedule.kind", "cosine"
        yield "schedule.warmup_steps", optimizer.warmup_steps
        yield "schedule.end_steps", optimizer.decay_steps
    yield "schedule.final_factor", optimizer.final_factor


def terms(part: TrainingPlan, point: MeasuredPoint[TrainingPoint]) -> ComparisonTerms:
    """Return what a training point is compared by."""
    losses, result = loss_of(part, point), point.result
    tables = {
        "shape.": part.shape,
        "training.": part.training,
        "data.": part.data,
        "layout.": point.part.layout,
    }
    settings = {
        "microbatch": str(result.microbatch),
        "attention backend": result.attention_backend,
        "parallelism": result.parallelism,
        "data hash": result.data_hash,
        ORDER: result.order_hash,
    }
    for prefix, one in tables.items():
        settings |= flat(one, prefix) if one else {}
    return ComparisonTerms(
        settings={"model": settings.pop("training.model"), **settings},
        curves={"loss": losses} if losses else {},
        timed=partial(_run, part, point),
    )


def _run(plan: TrainingPlan, one: MeasuredPoint[TrainingPoint], gpu: Gpu, speed: float | None) -> Run | None:
    """Return a point as a prediction learns from it; None of nodes whose network has no known speed."""
    part, place, time = one.part, one.planned, one.measurement("step-time")
    training = trained(plan.training, part.layout)
    training = training.model_copy(update={"sharding": part.sharding or training.sharding})
    if time is None or training.trainer not in (COMPOSER, PLAIN) or (place.nodes > 1 and not speed):
        return None
    layout = parallel_layout(training, part.layout, microbatch=one.result.microbatch)
    machines = Machines(gpu, place.devices_per_node, place.nodes, speed)
    return Run(Subject(part.shape or plan.shape, machines, layout, basis(SOFTWARE).software), time.median)


def loss_of(part: TrainingPlan, point: MeasuredPoint[TrainingPoint]) -> ControlledCurve | None:
    """Return the losses of a point with all that decides them; None where it has none that can be judged."""
    found, precision = point.one_series("loss"), part.training.precision
    if found is None or not found.values or precision == "fp8" or precision not in ROUNDING:
        return None
    return ControlledCurve(
        name=point.id,
        values=found.values,
        controls=tuple(one.values for one in point.series if one.id.startswith(CONTROL)),
        configuration=mathematics(part),
        origins=dict(point.digests),
        arithmetic=precision,
        rounding=ROUNDING[precision],
    )


def mathematics(part: TrainingPlan) -> dict[str, str]:
    """Return the settings that decide the loss, rounding aside."""
    training = {name: value for name, value in flat(part.training).items() if name not in ROUNDING_ONLY}
    return training | flat(part.shape, "shape.")
