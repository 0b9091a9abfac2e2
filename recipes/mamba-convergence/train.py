"""One training run of the loss curve: Mambaoutai on one number of devices."""

from __future__ import annotations

from twinrun.train import worker
from twinrun.train.composer_loop import train

if __name__ == "__main__":
    worker.main(train)
