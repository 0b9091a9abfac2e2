"""Evaluations of every model that lies in `families` of the job's folder, one after another."""

from __future__ import annotations

from pathlib import Path

from twinrun.protocol.evaluation import EvaluationJob, EvaluationResult, GivenModel
from twinrun.train import rank
from twinrun.train.evaluation import evaluate


def of_family(job: EvaluationJob, folder: Path) -> EvaluationJob:
    """Return the job of the model in a folder, which keeps there what it leaves."""
    own = {"metrics": str(folder / "metrics.jsonl"), "kept": str(folder / "kept")}
    return job.model_copy(update={**own, "model": GivenModel(folder=str(folder / "model"))})


def evaluate_each(job: EvaluationJob) -> EvaluationResult:
    """Score every model; return what the last one got."""
    folders = sorted((Path(job.out) / "families").iterdir())
    return [evaluate(of_family(job, folder)) for folder in folders][-1]


if __name__ == "__main__":
    rank.run(evaluate_each, EvaluationJob)
