"""One point of the throughput table: Mambaoutai on the devices of one node."""

from __future__ import annotations

from twinrun.train import worker
from twinrun.train.composer_loop import train

if __name__ == "__main__":
    worker.main(train)
