"""What the ranks of the fault trials run: a small training in torch alone."""

from __future__ import annotations

from tests.train.launcher import train
from twinrun.protocol.training import TrainingJob
from twinrun.train import rank

if __name__ == "__main__":
    rank.run(train, TrainingJob)
