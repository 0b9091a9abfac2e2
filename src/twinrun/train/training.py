"""What every rank of a training runs, unless its recipe has a script: `python -m twinrun.train.training`."""

from __future__ import annotations

from twinrun.protocol.training import TrainingJob, TrainingResult
from twinrun.train import attention, worker


def train(job: TrainingJob) -> TrainingResult:
    """Train the job's point by Composer, or in PyTorch alone; only the framework that is used is imported."""
    if job.training.attention == attention.TRITON and not job.accelerator:
        attention.interpret_triton()
    if job.training.trainer == "composer" and job.layout is None:
        from twinrun.train import composer_loop

        return composer_loop.train(job)
    from twinrun.train import loop

    return loop.train(job)


if __name__ == "__main__":
    worker.main(train)
