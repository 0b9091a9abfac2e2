"""From a recipe of an evaluation to the one placement at which it runs, and to the job of its ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinrun.checkpoints.manifest import Digest
from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import plural
from twinrun.manifests.recipe import SCALES, LoadedRecipe, Scale, Sweep
from twinrun.manifests.settings import overlay
from twinrun.protocol.evaluation import (
    MEAN,
    SAMPLES,
    DocumentsFile,
    EvaluationJob,
    GivenModel,
    NamedTask,
    PackageSource,
    TaskSpec,
    documents_file,
)
from twinrun.protocol.job import Checkpointing
from twinrun.protocol.layout import Precision
from twinrun.protocol.model_source import ModelSource, in_words, model_source
from twinrun.protocol.models import AnyShape
from twinrun.protocol.models.shape import Positive
from twinrun.protocol.training import DataSource, Training
from twinrun.workloads.settings import Fingerprint, as_fingerprint, flat
from twinrun.workloads.sweep import placements, refuse_demands
from twinrun.workloads.training import plan as trainings
from twinrun.workloads.training.manifest import MODULES, ModelTables, TrainingPlan, TrainingPoint
from twinrun.workloads.training.numbers import fingerprint
from twinrun.workloads.training.refusals import demand_known, missing_from, of_sizes, of_training, raise_first
from twinrun.workloads.workload import (
    Choice,
    DataRequest,
    Demand,
    PlanDescription,
    PlanRequest,
    Point,
    PointDescription,
    Run,
    WorkloadPlan,
)

DOCUMENTS = "documents"
HARNESS = "lm-eval"


class EvaluationScale(Scale):
    """One size at which a model is trained and scored."""

    sweep: Sweep


class Evaluation(Frozen):
    """A model, and what it is scored on."""

    model: str | None = None
    """A model that is there, scored as it is: `OWNER/NAME@COMMIT`, a folder, or `PLACE/step-NNNNNNNN@SHA256`.
    Null scores what `training` trains."""
    tokenizer: Digest | None = None
    """Digest that the tokenizer must have, as a record has it; any where not given."""
    training: Training
    """The training whose checkpoints are scored where no model is given."""
    every: Positive | None = None
    """Optimizer steps between two checkpoints that are scored, while the training goes on; the last is always
    scored."""
    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Rows of `tasks`."""
    shots: Annotated[int, Field(ge=0)] = 0
    """Examples with their answers before each question."""
    batch: Positive | Literal["auto"] = "auto"
    """Sequences of one forward pass of a device; `auto` takes the largest that fits into memory."""
    precision: Precision = "bf16"
    """Type of weights and arithmetic while scoring."""
    limit: Positive | None = None
    """The first documents of each task; all where not given."""
    documents: str | None = None
    """Documents of a task that no package has: `FOLDER/TASK.jsonl@SHA256`."""

    @model_validator(mode="after")
    def _whole(self) -> Evaluation:
        if self.training.microbatch == "auto":
            raise ValueError("`training.microbatch` is a number here")
        if self.training.controls:
            raise ValueError("a training that is scored has no control runs")
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError("a task is named twice")
        return self


class EvaluationTables(ModelTables[EvaluationScale]):
    """Tables of recipe.toml."""

    evaluation: Evaluation
    """The published configuration."""
    tasks: dict[str, TaskSpec]
    """Tasks by their names in the harness, each with its rule."""
    documents: PackageSource | None = None
    """Where the documents of the harness's tasks come from."""


class EvaluationPlan(Frozen):
    """What decides an evaluation."""

    evaluation: Evaluation
    tasks: tuple[NamedTask, ...]
    shape: AnyShape | None = None
    """Model that is trained; null where one is there."""
    data: DataSource | None = None
    """What it is trained on; null where a model is there."""
    documents: PackageSource | None = None
    """Null where no task of the harness is asked."""

    @property
    def trained(self) -> TrainingPlan | None:
        """The training whose checkpoints are scored; None where the model is there."""
        if self.shape is None or self.data is None:
            return None
        return TrainingPlan(shape=self.shape, training=self.evaluation.training, data=self.data)

    @property
    def given(self) -> ModelSource | None:
        """The model that is there; None where one is trained."""
        asked = self.evaluation.model
        return None if asked is None else model_source(asked, place="evaluation.model")

    @property
    def given_documents(self) -> DocumentsFile | None:
        """The file that the user names; None where none is."""
        asked = self.evaluation.documents
        return None if asked is None else documents_file(asked, place="evaluation.documents")

    @property
    def undocumented(self) -> tuple[str, ...]:
        """Tasks whose documents are in no package, and in no file that the user names."""
        given = self.given_documents
        names = (one.name for one in self.tasks if not one.packaged)
        return tuple(name for name in names if given is None or name != given.task)


class EvaluationPoint(Frozen):
    """What the placement adds to the plan."""

    microbatches: tuple[int, ...]
    """Sequences of one forward pass of the training, largest first, the first that fits is kept; none where
    nothing is trained."""


def trained_at(part: EvaluationPlan, point: Point[EvaluationPoint]) -> Point[TrainingPoint]:
    """Return a point as that of the training."""
    sharding = "none" if point.world_size == 1 else part.evaluation.training.sharding
    placed = TrainingPoint(microbatches=point.part.microbatches, sharding=sharding)
    return Point(**point.model_dump(exclude={"part"}), part=placed)


def check(recipe: LoadedRecipe[EvaluationTables], demands: Sequence[Demand]) -> Mapping[str, DataRequest]:
    """Hold the names inside recipe.toml, and what claims ask, against each other; raises InputError."""
    tables = recipe.tables
    tables.check_models(recipe.manifest)
    _demand_names(tables, tables.evaluation, f"{recipe.manifest}:evaluation.")
    names = [*tables.tasks, MEAN]
    given = {"score": names, "score-error": [f"{name}/error" for name in names]}
    given |= {
        name: [name]
        for name in ("loss", "requests-per-second", "forward-share", "step-time", "model-flops", "kept-fall")
    }
    sweeps = [tables.scale(name).sweep for name in SCALES]
    missing = missing_from(given, "an evaluation")
    refuse_demands(demands, lambda point: any(one.gives(point) for one in sweeps), missing)
    documents = {DOCUMENTS: _documents(tables.documents)} if tables.documents else {}
    return tables.data_requests(tables.evaluation.training.model) | documents


def _demand_names(tables: EvaluationTables, asked: Evaluation, place: str) -> None:
    """Raise InputError where an evaluation names a model, data or a task that the recipe does not have."""
    if asked.model is not None:
        model_source(asked.model, place=f"{place}model")
    demand_known(
        place,
        ("training.model", (asked.training.model,), tables.models),
        ("training.data", (asked.training.data,), tables.data),
        ("training.trainer", (asked.training.trainer,), MODULES),
        ("tasks", asked.tasks, tables.tasks),
    )
    if asked.documents is not None:
        given = documents_file(asked.documents, place=f"{place}documents")
        unpackaged = [name for name in asked.tasks if not tables.tasks[name].packaged]
        require_known(given.task, unpackaged, "no task reads this file", place=f"{place}documents")


def _documents(source: PackageSource) -> DataRequest:
    return DataRequest(name=DOCUMENTS, source=source, sequence=0)


def plan(request: PlanRequest[EvaluationTables]) -> WorkloadPlan[EvaluationPlan, EvaluationPoint]:
    """Turn a request into one evaluation at one placement.

    Raises:
        InputError: a setting that does not exist or does not fit.
        MachineError: this machine has too few devices.
    """
    recipe, tables, overrides = request.recipe, request.recipe.tables, dict(request.overrides)
    scale = tables.scale(request.scale)
    places, left_out = placements(scale.sweep, overrides, request.hardware, request.node_devices)
    asked = overlay(tables.evaluation, scale=scale.set, manifest=recipe.manifest, user=overrides)
    _demand_names(tables, asked, "--set ")
    # Scores are the same at every size: the most devices are the fastest.
    place, part, training = places[-1], _part(tables, asked), asked.training
    microbatches: tuple[int, ...] = ()
    if part.given:
        # Settings of the training, which a model that is there does not have.
        keys = [key for key in overrides if key.startswith("training.")] + ["every"] * bool(asked.every)
        message, hint = "nothing is trained: the model is there", "leave it or `model` out"
        raise_first((message, f"--set {key}", None, None, hint) for key in keys)
        choice = Choice(name="model", value=in_words(part.given), because="asked for; nothing is trained")
    else:
        sizes = of_sizes(training, (place.world_size,), table="training.")
        raise_first(of_training(request, training, table="training."), sizes)
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


def describe(part: EvaluationPlan, points: Sequence[Point[EvaluationPoint]]) -> PlanDescription:
    """Return what follows from a plan of an evaluation, and from that of its training."""
    asked, given, count = part.evaluation, part.given, len(part.tasks)
    rules = {one.name: f"{one.rule}, {asked.shots} shots" for one in part.tasks}
    scored = {name: value for name, value in flat(asked).items() if not name.startswith("training.")}
    found = PlanDescription(
        subject="",
        configuration=(),
        points={one.id: PointDescription(attempts=("the model",), steps=count) for one in points},
        kernels=False,
    )
    if part.trained:
        found = trainings.describe(part.trained, [trained_at(part, one) for one in points])
    return dataclasses.replace(
        found,
        subject=f"{in_words(given) if given else asked.training.model}, {plural(count, 'task')}",
        configuration=(("Evaluation", scored), ("Tasks", rules), *found.configuration),
        documents=_documents(part.documents) if part.documents else None,
        given_documents=part.given_documents,
        undocumented=part.undocumented,
        files=(SAMPLES,),
        model=given,
        fingerprint=settings(part),
    )


def as_written(
    tables: EvaluationTables, part: EvaluationPlan, point: Point[EvaluationPoint], _name: str
) -> tuple[EvaluationPlan, Point[EvaluationPoint]]:
    """Return a plan's part as recipe.toml has it at the paper scale, of the plan's own model."""
    asked = overlay(tables.evaluation, scale=tables.scales.paper.set, manifest="recipe.toml", user={})
    asked = asked.model_copy(update={"model": part.evaluation.model})
    written, own = _part(tables, asked), part.evaluation.training.model
    if written.shape and own in tables.models:
        written = written.model_copy(update={"shape": tables.models[own]})
    return written, point


def settings(part: EvaluationPlan, _point: Point[EvaluationPoint] | None = None) -> Fingerprint:
    """Return the settings of the model and its training, of the evaluation, its tasks and documents."""
    asked, given, trained, found = part.evaluation, part.given, part.trained, Fingerprint()
    if given:
        # Of a folder without a digest the record alone has one.
        kept = {"kind", "repository", "revision", "step", "sha256"}
        found = as_fingerprint(given.model_dump(include=kept, exclude_none=True), "model.")
    elif trained:
        found = fingerprint(trained)
        found |= {"tokens": trained.training.steps * int(found["tokens_per_step"])}
    found |= {"evaluation.harness": HARNESS}
    # Each without what stands under another name.
    tables: dict[str, tuple[Frozen | None, set[str]]] = {
        "evaluation.": (asked, {"training", "model", "documents"}),
        "documents.": (part.documents, {"source"}),
        **{f"task.{one.name}.": (one, {"name", "rule", "packaged"}) for one in part.tasks},
    }
    for prefix, (table, without) in tables.items():
        found |= as_fingerprint(table.model_dump(mode="json", exclude=without), prefix) if table else {}
    if named := part.given_documents:
        found |= {f"documents.{named.task}.sha256": named.sha256}
    return found | {f"evaluation.rule.{one.name}": one.rule for one in part.tasks}


def job(part: EvaluationPlan, point: Point[EvaluationPoint], attempt: int, run: Run) -> EvaluationJob:
    """Return the job of one attempt, with the microbatch that its training tries."""
    asked, folder, training = part.evaluation, PurePosixPath(run.metrics).parent, None
    if part.trained:
        place, steps = str(folder / "checkpoints" / point.id), asked.every or asked.training.steps
        own = {
            "checkpointing": run.checkpointing or Checkpointing(place=place, steps=steps),
            "validation_data": "",
        }
        training = trainings.job(part.trained, trained_at(part, point), attempt, run).model_copy(update=own)
    names = ("shots", "batch", "precision", "limit", "tokenizer", "every")
    return EvaluationJob(
        **run.at(point, "checkpointing", "power"),
        **{name: getattr(asked, name) for name in names},
        tasks=part.tasks,
        training=training,
        model=GivenModel(folder=run.folders["model"], **part.given.model_dump(include={"sha256"}))
        if part.given
        else None,
        documents=run.folders.get("documents", ""),
        given=run.folders.get("given", ""),
        kept=str(folder / "models" / point.id),
    )
