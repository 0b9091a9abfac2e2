"""What the ranks of the fault trials run: a small training in torch alone."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.train import checkpoint_run
from twinrun.protocol.job import Result
from twinrun.protocol.training import TrainingJob
from twinrun.train import worker
from twinrun.train.corpus import Corpus


def train(job: TrainingJob) -> Result:
    torch.set_num_threads(1)
    checkpoint_run.train(job, Corpus.model_validate_json(Path(job.data, "corpus.json").read_text()))
    return Result(point=job.point, device_name="cpu", libraries={})


if __name__ == "__main__":
    worker.run(train, TrainingJob)
