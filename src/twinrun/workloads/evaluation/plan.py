"""From a recipe of an evaluation to the one placement at which it runs, and to the job of its ranks."""

from __future__ import annotations

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
from twinrun.protocol.model_source import CheckpointModel, FolderModel, ModelSource, in_words
from twinrun.protocol.training import TrainingJob, identity
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
from twinrun.workloads.training.manifest import MODULES
from twinrun.workloads.training.refusals import refuse_composer
from twinrun.workloads.training.terms import fingerprint
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


def check(recipe: LoadedRecipe[EvaluationTables], demands: Sequence[Demand]) -> Mapping[str, DataRequest]:
    """Hold the names inside recipe.toml, and what claims ask, against each other; raises InputError."""
    check_names(recipe)
    tables = recipe.tables
    names = (*tables.tasks, MEAN)
    given = {SCORE: names, ERROR: tuple(f"{name}/error" for name in names), "loss": ("loss",)}
    given |= {name: (name,) for name in (RATE, FORWARD, "step-time", "model-flops", KEPT)}

    def missing(asked: Demand) -> str | None:
        if asked.metric not in given:
            return f"an evaluation measures {', '.join(given)}"
        if asked.measurement is None and asked.metric == SCORE:
            return "which task is not said: `measurement` is needed"
        known = asked.measurement in (None, *given[asked.metric])
        return None if known else f"the tasks give no measurement {asked.measurement}"

    sweeps = [tables.scale(name).sweep for name in SCALES]
    refuse_demands(demands, lambda point: any(one.gives(point) for one in sweeps), missing)
    documents = {DOCUMENTS: _documents(tables.documents)} if tables.documents else {}
    return tables.data_requests(tables.evaluation.training.model) | documents


def _documents(source: PackageSource) -> DataRequest:
    return DataRequest(name=DOCUMENTS, source=source, sequence=0)


def plan(request: PlanRequest[EvaluationTables]) -> WorkloadPlan[EvaluationPlan, EvaluationPoint]:
    """Turn a request into one evaluation at one placement.

    Raises:
        InputError: a setting that does not exist or does not fit.
        MachineError: this machine has too few devices.
    """
    recipe, tables, overrides = request.recipe, request.recipe.tables, dict(request.overrides)
    scale, hardware = tables.scale(request.scale), request.hardware
    places, left_out = placements(scale.sweep, overrides, hardware, request.node_devices)
    asked = overlay(tables.evaluation, scale=scale.set, manifest=recipe.manifest, user=overrides)
    demand_known(tables, asked, "--set ")
    # Scores are the same at every size: the most devices are the fastest.
    place, part = places[-1], _part(tables, asked)
    if part.given:
        _refuse_of_training(asked, overrides)
        choice = Choice(name="model", value=in_words(part.given), because="asked for; nothing is trained")
        microbatches: tuple[int, ...] = ()
    else:
        training = asked.training
        _refuse_training(asked, place, hardware)
        choice = Choice(name="model", value=training.model, because=f"trained for {training.steps} steps")
        largest = training.microbatch
        assert isinstance(largest, int), "refused when the manifest is read"
        # The size that was asked for, and halves of it for devices with less memory.
        microbatches = tuple(largest >> half for half in range(largest.bit_length()))
    tasks = Choice(name="tasks", value=plural(len(part.tasks), "task"), because=", ".join(asked.tasks))
    point = Point(**place.model_dump(), part=EvaluationPoint(microbatches=microbatches))
    return WorkloadPlan(part=part, points=(point,), choices=(choice, tasks, *left_out))


def _part(tables: EvaluationTables, asked: Evaluation) -> EvaluationPlan:
    """Return what decides an evaluation; raises InputError where the recipe does not say whose documents."""
    named = tuple(NamedTask(name=name, **tables.tasks[name].model_dump()) for name in asked.tasks)
    harness = [one.name for one in named if one.kind == "harness"]
    if harness and tables.documents is None:
        raise InputError("tasks of the harness need documents", place=DOCUMENTS, found=", ".join(harness))
    trains, training = asked.model is None, asked.training
    return EvaluationPlan(
        evaluation=asked,
        tasks=named,
        shape=tables.models[training.model] if trains else None,
        data=tables.data[training.data] if trains else None,
        documents=tables.documents if harness else None,
    )


def _refuse_of_training(asked: Evaluation, overrides: Mapping[str, object]) -> None:
    """Raise InputError for a setting of the training that a model which is there does not have."""
    for key in ("every", *overrides):
        if key.startswith("training.") or (key == "every" and asked.every is not None):
            message, hint = "nothing is trained: the model is there", "leave it or `model` out"
            raise InputError(message, place=f"--set {key}", hint=hint)


def _refuse_training(asked: Evaluation, place: Placement, hardware: Hardware) -> None:
    """Raise InputError for a training that cannot be scored at a placement."""
    training, table = asked.training, "--set training."
    if training.trainer not in MODULES:
        message, allowed = "a training that is scored is trained whole", tuple(MODULES)
        raise InputError(message, place=f"{table}trainer", found=training.trainer, allowed=allowed)
    refuse_composer(training, hardware, table="training.")
    if training.global_batch % place.world_size:
        message, most = "the global batch does not divide over the devices", place.world_size
        found, each = training.global_batch, f"a multiple of {most}"
        raise InputError(message, place=f"{table}global_batch", found=found, allowed=each)


def describe(part: EvaluationPlan, points: Sequence[Point[EvaluationPoint]]) -> PlanDescription:
    """Return what follows from a plan of an evaluation."""
    asked, given, training = part.evaluation, part.given, part.evaluation.training
    rules = {one.name: f"{one.rule}, {asked.shots} shots" for one in part.tasks}
    scored = {name: value for name, value in flat(asked).items() if not name.startswith("training.")}
    shown, steps = [("Evaluation", scored), ("Tasks", rules)], len(part.tasks)
    attempts: dict[str, tuple[str, ...]] = {}
    placed, own = dict[str, Any](), dict[str, Any]()
    if part.shape and part.data:
        shown += [("Training", flat(training)), ("Model", flat(part.shape)), ("Data", flat(part.data))]
        attempts = {one.id: tuple(f"microbatch {size}" for size in one.part.microbatches) for one in points}
        steps, rising = training.steps, training.optimizer.warmup_steps or 0
        placed = {"rising_steps": rising, "vocabulary": part.shape.vocabulary}
        own = {
            "data": DataRequest(name=training.data, source=part.data, sequence=part.shape.sequence),
            "identity": identity(part.shape, training),
            "modules": MODULES[training.trainer],
        }
    return PlanDescription(
        subject=f"{in_words(given) if given else training.model}, {plural(len(part.tasks), 'task')}",
        configuration=tuple(shown),
        points={
            one.id: PointDescription(attempts=attempts.get(one.id, ("the model",)), steps=steps, **placed)
            for one in points
        },
        documents=_documents(part.documents) if part.documents else None,
        given_documents=part.given_documents,
        undocumented=part.undocumented,
        files=(SAMPLES,),
        model=given,
        kernels=given is None and (training.kernels == "ours" or training.attention == "triton"),
        fingerprint=_fingerprint(part),
        **own,
    )


def as_written(
    tables: EvaluationTables, part: EvaluationPlan, point: Point[EvaluationPoint], _name: str
) -> tuple[EvaluationPlan, Point[EvaluationPoint]]:
    """Return a plan's part as recipe.toml has it at the paper scale, of the plan's own model."""
    asked = overlay(tables.evaluation, scale=tables.scales.paper.set, manifest="recipe.toml", user={})
    if part.given:
        asked = asked.model_copy(update={"model": part.evaluation.model})
    written, own = _part(tables, asked), part.evaluation.training.model
    if written.shape and own in tables.models:
        written = written.model_copy(update={"shape": tables.models[own]})
    return written, point


def settings(part: EvaluationPlan, _point: Point[EvaluationPoint]) -> Fingerprint:
    """Return the fingerprint, and every other setting of the evaluation, its tasks and their documents."""
    others = flat_fields(part.evaluation, "evaluation.")
    for task in part.tasks:
        others |= flat_fields(task, f"task.{task.name}.")
    others |= flat_fields(part.documents, "documents.") if part.documents else {}
    if given := part.given_documents:
        others |= {f"documents.{given.task}.sha256": given.sha256}
    return _fingerprint(part) | {name: one for name, one in others.items() if not _IN_WORDS.match(name)}


def _fingerprint(part: EvaluationPlan) -> Fingerprint:
    """Return the model's fields, and those of a score: harness, shots, and the rule of each task."""
    asked, given, found = part.evaluation, part.given, {}
    if given:
        # Of a folder without a digest the record alone has one.
        kept = {"repository", "revision", "step", "sha256"}
        marks = {"kind": given.kind, **given.model_dump(include=kept, exclude_none=True)}
        found = {f"model.{name}": value for name, value in marks.items()}
    elif part.shape and part.data:
        tokens = asked.training.steps * asked.training.global_batch * part.shape.sequence
        found = {**fingerprint(part.shape, asked.training, part.data), "tokens": tokens}
    return {
        **found,
        "evaluation.harness": HARNESS,
        "evaluation.shots": asked.shots,
        "evaluation.precision": asked.precision,
        "evaluation.limit": asked.limit or "none",
        **{f"evaluation.rule.{one.name}": one.rule for one in part.tasks},
    }


def job(part: EvaluationPlan, point: Point[EvaluationPoint], attempt: int, run: Run) -> EvaluationJob:
    """Return the job of one attempt, with the microbatch that its training tries."""
    asked, folder = part.evaluation, PurePosixPath(run.metrics).parent
    shared = run.model_dump(exclude={"checkpointing"}) | {"point": point.id, "world_size": point.world_size}
    training = None
    if part.shape:
        place, steps = str(folder / "checkpoints" / point.id), asked.every or asked.training.steps
        training = TrainingJob(
            **shared,
            data=run.folders.get("data", ""),
            checkpointing=run.checkpointing or Checkpointing(place=place, steps=steps),
            shape=part.shape,
            training=asked.training,
            microbatch=point.part.microbatches[attempt],
            sharding="none" if point.world_size == 1 else asked.training.sharding,
        )
    return EvaluationJob(
        **{name: value for name, value in shared.items() if name != "power"},
        tasks=part.tasks,
        shots=asked.shots,
        batch=asked.batch,
        precision=asked.precision,
        limit=asked.limit,
        training=training,
        model=_given(part.given, run.folders["model"]) if part.given else None,
        tokenizer=asked.tokenizer,
        every=asked.every,
        documents=run.folders.get("documents", ""),
        given=run.folders.get("given", ""),
        kept=str(folder / "models" / point.id),
    )


def _given(source: ModelSource, folder: str) -> GivenModel:
    match source:
        case FolderModel(sha256=sha256):
            return GivenModel(folder=folder, sha256=sha256)
        case CheckpointModel(step=step, sha256=sha256):
            return GivenModel(folder=folder, step=step, checkpoint_sha256=sha256)
    return GivenModel(folder=folder)
