"""The same leg in PyTorch alone: starts in half the time, and can sum in a fixed tree."""

from __future__ import annotations

from twinrun.train import worker
from twinrun.train.loop import train

if __name__ == "__main__":
    worker.main(train)
