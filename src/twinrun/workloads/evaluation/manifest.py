"""What a recipe of an evaluation says beside what every recipe says, and the part of a plan that follows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinrun.checkpoints.manifest import Digest
from twinrun.foundation.errors import require_known
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.recipe import LoadedRecipe, Scale, Sweep
from twinrun.protocol.evaluation import DocumentsFile, NamedTask, PackageSource, TaskSpec, documents_file
from twinrun.protocol.layout import Precision
from twinrun.protocol.model_source import ModelSource, model_source
from twinrun.protocol.models import AnyShape
from twinrun.protocol.models.shape import Positive
from twinrun.protocol.training import DataSource, Training
from twinrun.workloads.training.manifest import ModelTables


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

    @model_validator(mode="after")
    def _model_or_training(self) -> EvaluationPlan:
        trained = self.evaluation.model is None
        if trained != (self.shape is not None) or trained != (self.data is not None):
            raise ValueError("`shape` and `data` are those of a training, and there where no model is")
        return self

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


def check_names(recipe: LoadedRecipe[EvaluationTables]) -> None:
    """Hold the names inside recipe.toml against each other; raises InputError."""
    recipe.tables.check_models(recipe.manifest)
    demand_known(recipe.tables, recipe.tables.evaluation, f"{recipe.manifest}:evaluation.")


def demand_known(tables: EvaluationTables, asked: Evaluation, place: str) -> None:
    """Raise InputError where an evaluation names a model, data or a task that the recipe does not have."""
    if asked.model is not None:
        model_source(asked.model, place=f"{place}model")
    for key, names, known in (
        ("training.model", (asked.training.model,), sorted(tables.models)),
        ("training.data", (asked.training.data,), sorted(tables.data)),
        ("tasks", asked.tasks, list(tables.tasks)),
    ):
        for name in names:
            require_known(name, known, "no such name", place=f"{place}{key}")
    if asked.documents is not None:
        given = documents_file(asked.documents, place=f"{place}documents")
        unpackaged = [name for name in asked.tasks if not tables.tasks[name].packaged]
        require_known(given.task, unpackaged, "no task reads this file", place=f"{place}documents")
