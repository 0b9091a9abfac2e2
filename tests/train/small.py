"""A small corpus, jobs on it, and ranks to run them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import environment, run_ranks
from twinrun.protocol.bench import BenchJob
from twinrun.protocol.job import Job
from twinrun.protocol.models.mpt import MptShape
from twinrun.protocol.training import Optimizer, Training, TrainingJob
from twinrun.train.corpus import TOKEN, Corpus, Origin, Tokens, read_corpus, write_corpus

ROOT = Path(__file__).parents[2]
TRAINING = "twinrun.train.training"
# The script of the recipe that brings DeepSpeed's engines.
LAYOUTS = ROOT / "recipes" / "deepspeed-pretrain" / "train.py"
# What ranks need, imported where they are forked: they train for less time than they import.
READING = tuple(f"streaming.base.{name}" for name in ("format", "partition", "shuffle", "sampling"))
LOADED = (*(f"twinrun.train.{name}" for name in ("loop", "data_parallel", "composer_loop")), *READING)
WITH_DEEPSPEED = ("twinrun.train.loop", "deepspeed", *READING)
SHAPE = MptShape(width=32, heads=2, layers=2, vocabulary=64, sequence=16)
STEPS = 6
GLOBAL_BATCH = 16

MakeJob = Callable[..., TrainingJob]


def documents(count: int = 20) -> Iterator[tuple[Tokens, int]]:
    """Yield documents of 20 to 100 tokens below 64 that a small model learns quickly."""
    draw = np.random.default_rng(7)
    for _ in range(count):
        steps = draw.integers(0, 3, size=draw.integers(20, 100))
        yield (steps.cumsum() % 64).astype(TOKEN), len(steps)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus of a few global batches, so that runs pass the end of an epoch."""
    folder = tmp_path_factory.mktemp("data") / "small"
    write_corpus(folder, Origin(source="test", sequence=SHAPE.sequence), documents())
    return folder


@pytest.fixture(scope="session")
def corpus(corpus_folder: Path) -> Corpus:
    return read_corpus(corpus_folder)


@pytest.fixture(scope="session")
def make_job(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeJob:
    """Return a job on the small corpus with a folder of its own."""

    def make(
        *,
        world_size: int = 1,
        sharding: str | None = None,
        microbatch: int = 4,
        shape: MptShape = SHAPE,
        **training: Any,
    ) -> TrainingJob:
        out = tmp_path_factory.mktemp("run")
        settings = {
            "model": "small",
            "data": "test",
            "global_batch": GLOBAL_BATCH,
            "precision": "fp32",
            "sharding": "full",
            "compile": False,
            "steps": STEPS,
            # A step must be left that is timed.
            "warmup_steps": min(2, training.get("steps", STEPS) - 1),
            # AdamW hides the size of gradients but for a large epsilon; the largest norm is between
            # those that occur, so that some steps are clipped and some are not.
            "optimizer": Optimizer(
                learning_rate=0.03, epsilon=0.1, warmup_steps=2, decay_steps=STEPS, gradient_clip=2.4
            ),
        }
        return TrainingJob.model_validate(
            {
                "recipe": "mpt7b-scaling",
                "point": f"devices={world_size}",
                "shape": shape,
                "training": Training.model_validate(settings | training),
                "microbatch": microbatch,
                "world_size": world_size,
                "sharding": sharding or ("none" if world_size == 1 else "full"),
                "accelerator": False,
                "data": str(corpus_folder),
                "out": str(out),
                "metrics": str(out / "metrics.jsonl"),
                "attempt": "1",
            }
        )

    return make


def bench_job(
    folder: Path,
    *,
    labels: object,
    settings: object = None,
    repeats: int = 0,
    seed: int | None = None,
    world_size: int = 1,
) -> BenchJob:
    """Return the job of a case that its ranks run on CPUs, with one warm-up call."""
    return BenchJob.model_validate(
        {
            "recipe": "small",
            "point": "small",
            "case": "small",
            "world_size": world_size,
            "accelerator": False,
            "out": str(folder),
            "metrics": str(folder / "metrics.jsonl"),
            "attempt": "1",
            "settings": settings or {},
            "labels": labels,
            "timing": {"warmup": 1, "repeats": repeats, "seed": seed},
        }
    )


def launch(
    script: Path | str, job: Job, *, modules: tuple[str, ...] = LOADED, beside: Job | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script or a module for `job` on ranks that are forked where `modules` are imported.

    Args:
        beside: another job with as many ranks, run at the same time.
    """
    arguments, other = (("--job", str(job_file(one))) if one else () for one in (job, beside))
    size, variables = job.world_size, environment()
    return run_ranks(script, *arguments, world_size=size, variables=variables, modules=modules, beside=other)


def job_file(job: Job) -> Path:
    """Write what ranks are told, and return where."""
    file = Path(job.out) / "job.json"
    file.write_text(job.model_dump_json())
    return file


def launch_by_torchrun(script: Path, job: Job) -> subprocess.CompletedProcess[str]:
    """Run `script` for `job` under torchrun, as the local launcher does."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(job.world_size), str(script), "--job", str(job_file(job))),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
