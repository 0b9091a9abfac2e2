"""From a recipe of an evaluation to the one placement at which it runs, and to the job of its ranks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.foundation.text import plural
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.manifests.settings import overlay
from twinrun.protocol.allocation import Placement
from twinrun.protocol.evaluation import MEAN, SAMPLES, EvaluationJob, GivenModel, NamedTask, PackageSource
from twinrun.protocol.job import Checkpointing
from twinrun.protocol.model_source import (
    CheckpointModel,
    FolderModel,
    ModelSource,
    RepositoryModel,
    in_words,
)
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import DataSource, Training, TrainingJob, identity
from twinrun.workloads.evaluation.manifest import (
    Evaluation,
    EvaluationPlan,
    EvaluationPoint,
    EvaluationTables,
    check_names,
    demand_known,
)
from twinrun.workloads.settings import Fingerprint, flat, flat_fields
from twinrun.workloads.sweep import placements, refuse_demands
from twinrun.workloads.training_terms import fingerprint, refuse_composer
from twinrun.workloads.workload import (
    Choice,
    DataRequest,
    Demand,
    Hardware,
    PlanDescription,
    PlanRequest,
    Point,
    PointDescription,
    Run,
    WorkloadPlan,
)

DOCUMENTS = "documents"
SCORE, ERROR, RATE, KEPT = "score", "score-error", "requests-per-second", "kept-fall"
FORWARD = "forward-share"
HARNESS = "lm-eval"
# Settings that the fingerprint has in other words: which model, how that was trained, and rules of tasks.
_IN_WORDS = re.compile(
    r"evaluation\.(training\.|model$|shots$|limit$|documents$)|task\..*\.(name|rule|packaged)$|documents\.source$"
)
# Frameworks that the ranks of a training import when they start.
_MODULES = {"composer": ("twinrun.train.composer_loop",), "plain": ("twinrun.train.data_parallel",)}


def check(recipe: LoadedRecipe[EvaluationTables], demands: Sequence[Demand]) -> Mapping[str, DataRequest]:
    """Hold the names inside recipe.toml, and what claims ask, against each other; raises InputError."""
    check_names(recipe)
    tables = recipe.tables
    refuse_demands(demands, lambda one: _missing(tables, one))
    sequence = tables.models[tables.evaluation.training.model].sequence
    known = {
        name: DataRequest(name=name, source=source, sequence=sequence) for name, source in tables.data.items()
    }
    return known | ({DOCUMENTS: _documents(tables.documents)} if tables.documents else {})


def _documents(source: PackageSource) -> DataRequest:
    return DataRequest(name=DOCUMENTS, source=source, sequence=0)


def _missing(tables: EvaluationTables, asked: Demand) -> str | None:
    """Return why no scale gives a number, or None."""
    if asked.point is not None and not any(tables.scale(name).sweep.gives(asked.point) for name in SCALES):
        return f"no scale has a point {asked.point}"
    names = (*tables.tasks, MEAN)
    given = {SCORE: names, ERROR: tuple(f"{name}/error" for name in names), "loss": ("loss",)}
    given |= {name: (name,) for name in (RATE, FORWARD, "step-time", "model-flops", KEPT)}
    if asked.metric not in given:
        return f"an evaluation measures {', '.join(given)}"
    if asked.measurement is None and asked.metric == SCORE:
        return "which task is not said: `measurement` is needed"
    if asked.measurement in (None, *given[asked.metric]):
        return None
    return f"the tasks give no measurement {asked.measurement}"


def plan(request: PlanRequest[EvaluationTables]) -> WorkloadPlan[EvaluationPlan, EvaluationPoint]:
    """Turn a request into one evaluation at one placement.

    Raises:
        InputError: a setting that does not exist or does not fit.
        MachineError: this machine has too few devices.
    """
    recipe, tables, overrides = request.recipe, request.recipe.tables, dict(request.overrides)
    scale, hardware = tables.scale(request.scale), request.hardware
    places, left_out = placements(
        scale.sweep, overrides, hardware=hardware, node_devices=request.node_devices
    )
    asked = overlay(tables.evaluation, scale=scale.set, manifest=recipe.manifest, user=overrides)
    demand_known(tables, asked, "--set ")
    # Scores are the same at every size: the most devices are the fastest.
    place = places[-1]
    named = tuple(NamedTask(name=name, **tables.tasks[name].model_dump()) for name in asked.tasks)
    documents = _needed(tables, named)
    if asked.model is not None:
        part = EvaluationPlan(evaluation=asked, tasks=named, documents=documents)
        assert part.given
        _refuse_of_training(asked, overrides)
        microbatches: tuple[int, ...] = ()
        choice = Choice(name="model", value=in_words(part.given), because="asked for; nothing is trained")
    else:
        training = _trainable(asked.training, place, hardware)
        shape, data = tables.models[training.model], tables.data[training.data]
        part = EvaluationPlan(evaluation=asked, tasks=named, shape=shape, data=data, documents=documents)
        microbatches = _microbatches(training.microbatch)
        because = f"trained for {training.steps} steps"
        choice = Choice(name="model", value=training.model, because=because)
    tasks = ", ".join(one.name for one in named)
    return WorkloadPlan(
        part=part,
        points=(Point(**place.model_dump(), part=EvaluationPoint(microbatches=microbatches)),),
        choices=(choice, Choice(name="tasks", value=plural(len(named), "task"), because=tasks), *left_out),
    )


def _refuse_of_training(asked: Evaluation, overrides: Mapping[str, object]) -> None:
    """Raise InputError for a setting of the training that a model which is there does not have."""
    for key in ("every", *overrides):
        if key.startswith("training.") or (key == "every" and asked.every is not None):
            raise InputError(
                "nothing is trained: the model is there", place=f"--set {key}", hint="leave it or `model` out"
            )


def _trainable(training: Training, place: Placement, hardware: Hardware) -> Training:
    """Return a training that can be scored at a placement; raises InputError."""
    if training.trainer not in _MODULES:
        raise InputError(
            "a training that is scored is trained whole",
            place="--set training.trainer",
            found=training.trainer,
            allowed=tuple(_MODULES),
        )
    refuse_composer(training, hardware, table="training.")
    if training.global_batch % place.world_size:
        raise InputError(
            "the global batch does not divide over the devices",
            place="--set training.global_batch",
            found=training.global_batch,
            allowed=f"a multiple of {place.world_size}",
        )
    return training


def _needed(tables: EvaluationTables, named: Sequence[NamedTask]) -> PackageSource | None:
    """Return where the documents come from; raises InputError where the recipe does not say."""
    harness = [one.name for one in named if one.kind == "harness"]
    if harness and tables.documents is None:
        raise InputError("tasks of the harness need documents", place=DOCUMENTS, found=", ".join(harness))
    return tables.documents if harness else None


def _microbatches(largest: object) -> tuple[int, ...]:
    """Return the size that was asked for, and halves of it for devices with less memory."""
    assert isinstance(largest, int), "refused when the manifest is read"
    return tuple(largest >> half for half in range(largest.bit_length()))


def describe(part: EvaluationPlan, points: Sequence[Point[EvaluationPoint]]) -> PlanDescription:
    """Return what follows from a plan of an evaluation."""
    asked, given = part.evaluation, part.given
    rules = {one.name: f"{one.rule}, {asked.shots} shots" for one in part.tasks}
    scored = {name: value for name, value in flat(asked).items() if not name.startswith("training.")}
    described = PlanDescription(
        subject=f"{in_words(given) if given else asked.training.model}, {plural(len(part.tasks), 'task')}",
        configuration=(("Evaluation", scored), ("Tasks", rules)),
        points={
            point.id: PointDescription(attempts=("the model",), steps=len(part.tasks)) for point in points
        },
        documents=_documents(part.documents) if part.documents else None,
        given_documents=part.given_documents,
        undocumented=part.undocumented,
        files=(SAMPLES,),
        model=given,
        kernels=False,
        fingerprint=_fingerprint(part),
    )
    return described if given else _with_training(described, part, points)


def _with_training(
    described: PlanDescription, part: EvaluationPlan, points: Sequence[Point[EvaluationPoint]]
) -> PlanDescription:
    """Return the description of a plan whose model is trained first."""
    training, (shape, data) = part.evaluation.training, _trained(part)
    shown = (("Training", flat(training)), ("Model", flat(shape)), ("Data", flat(data)))
    return dataclasses.replace(
        described,
        configuration=(*described.configuration, *shown),
        points={
            point.id: PointDescription(
                attempts=tuple(f"microbatch {size}" for size in point.part.microbatches),
                steps=training.steps,
                rising_steps=training.optimizer.warmup_steps or 0,
                vocabulary=shape.vocabulary,
            )
            for point in points
        },
        data=DataRequest(name=training.data, source=data, sequence=shape.sequence),
        identity=identity(shape, training),
        kernels=training.kernels == "ours" or training.attention == "triton",
        modules=_MODULES[training.trainer],
    )


def _trained(part: EvaluationPlan) -> tuple[AnyShape, DataSource]:
    """Return the model that is trained, and on what."""
    assert part.shape is not None, "a model is there"
    assert part.data is not None, "a model is there"
    return part.shape, part.data


def as_written(
    tables: EvaluationTables, part: EvaluationPlan, point: Point[EvaluationPoint], _name: str
) -> tuple[EvaluationPlan, Point[EvaluationPoint]]:
    """Return a plan's part as recipe.toml has it at the paper scale, of the plan's own model."""
    asked = overlay(tables.evaluation, scale=tables.scales.paper.set, manifest="recipe.toml", user={})
    own = part.evaluation.training.model
    own = own if own in tables.models else asked.training.model
    if part.given:
        asked = asked.model_copy(update={"model": part.evaluation.model})
    named = tuple(NamedTask(name=name, **tables.tasks[name].model_dump()) for name in asked.tasks)
    trains = part.given is None
    written = EvaluationPlan(
        evaluation=asked,
        tasks=named,
        shape=tables.models[own] if trains else None,
        data=tables.data[asked.training.data] if trains else None,
        documents=_needed(tables, named),
    )
    return written, point


def settings(part: EvaluationPlan, _point: Point[EvaluationPoint]) -> Fingerprint:
    """Return the fingerprint, and every other setting of the evaluation, its tasks and their documents."""
    stated = _fingerprint(part)
    others = flat_fields(part.evaluation, "evaluation.")
    for task in part.tasks:
        others |= flat_fields(task, f"task.{task.name}.")
    others |= flat_fields(part.documents, "documents.") if part.documents else {}
    if given := part.given_documents:
        others |= {f"documents.{given.task}.sha256": given.sha256}
    return stated | {name: value for name, value in others.items() if not _IN_WORDS.match(name)}


def _fingerprint(part: EvaluationPlan) -> Fingerprint:
    """Return the model's fields, and those of a score: harness, shots, and the rule of each task."""
    asked = part.evaluation
    return {
        **(_given_marks(part.given) if part.given else _training_marks(part)),
        "evaluation.harness": HARNESS,
        "evaluation.shots": asked.shots,
        "evaluation.precision": asked.precision,
        "evaluation.limit": asked.limit or "none",
        **{f"evaluation.rule.{one.name}": one.rule for one in part.tasks},
    }


def _given_marks(given: ModelSource) -> Fingerprint:
    """Return what says which model is there; of a folder without a digest its record alone has one."""
    found = given.model_dump(include={"repository", "revision", "step", "sha256"}, exclude_none=True)
    return {f"model.{name}": value for name, value in {"kind": given.kind, **found}.items()}


def _training_marks(part: EvaluationPlan) -> Fingerprint:
    training, (shape, data) = part.evaluation.training, _trained(part)
    tokens = training.steps * training.global_batch * shape.sequence
    return {**fingerprint(shape, training, data), "tokens": tokens}


def job(part: EvaluationPlan, point: Point[EvaluationPoint], attempt: int, run: Run) -> EvaluationJob:
    """Return the job of one attempt, with the microbatch that its training tries."""
    asked = part.evaluation
    shared = run.model_dump(exclude={"checkpointing"}) | {"point": point.id, "world_size": point.world_size}
    return EvaluationJob(
        **{name: value for name, value in shared.items() if name != "power"},
        tasks=part.tasks,
        shots=asked.shots,
        batch=asked.batch,
        precision=asked.precision,
        limit=asked.limit,
        training=None if part.given else _training_job(part, point, attempt, run, shared),
        model=_given(part.given, run.folders["model"]) if part.given else None,
        tokenizer=asked.tokenizer,
        every=asked.every,
        documents=run.folders.get("documents", ""),
        given=run.folders.get("given", ""),
        kept=str(PurePosixPath(run.metrics).parent / "models" / point.id),
    )


def _given(source: ModelSource, folder: str) -> GivenModel:
    match source:
        case FolderModel(sha256=sha256):
            return GivenModel(folder=folder, sha256=sha256)
        case CheckpointModel(step=step, sha256=sha256):
            return GivenModel(folder=folder, step=step, checkpoint_sha256=sha256)
        case RepositoryModel():
            return GivenModel(folder=folder)


def _training_job(
    part: EvaluationPlan,
    point: Point[EvaluationPoint],
    attempt: int,
    run: Run,
    shared: Mapping[str, Any],
) -> TrainingJob:
    training, (shape, _) = part.evaluation.training, _trained(part)
    saved = run.checkpointing or Checkpointing(
        place=str(PurePosixPath(run.metrics).parent / "checkpoints" / point.id),
        steps=part.evaluation.every or training.steps,
    )
    return TrainingJob(
        **shared,
        data=run.folders.get("data", ""),
        checkpointing=saved,
        shape=shape,
        training=training,
        microbatch=point.part.microbatches[attempt],
        sharding="none" if point.world_size == 1 else training.sharding,
    )
