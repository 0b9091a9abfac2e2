"""What the ranks of the fault trials run: a small training in torch alone."""

from __future__ import annotations

from tests.train.launcher import train
from twinrun.protocol.training import TrainingJob
from twinrun.train import worker

if __name__ == "__main__":
    worker.run(train, TrainingJob)
