"""One leg, or the undisturbed run, of the loss curve: MPT on one number of devices."""

from __future__ import annotations

from twinrun.train import worker
from twinrun.train.composer_loop import train

if __name__ == "__main__":
    worker.main(train)
