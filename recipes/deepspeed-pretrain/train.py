"""One layout of the sweep: the same training by PyTorch's own data parallelism or by DeepSpeed."""

from __future__ import annotations

from twinrun.train import worker
from twinrun.train.loop import train

if __name__ == "__main__":
    worker.main(train)
