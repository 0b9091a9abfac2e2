"""The same point in plain PyTorch: what train.py is held against."""

from __future__ import annotations

from twinrun.train import worker
from twinrun.train.loop import train

if __name__ == "__main__":
    worker.main(train)
