"""The frame of a recipe's training script: job in, result out, failures told to the launcher."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from twinrun.benchmark import BenchJob, BenchResult
from twinrun.files import write_atomically
from twinrun.manifest import load_json
from twinrun.train import attention
from twinrun.train import device as devices
from twinrun.train.metrics import Meter, largest_over_ranks
from twinrun.train.models.mpt import MPT
from twinrun.training import OUT_OF_MEMORY, Job, PointResult

__all__ = ["OUT_OF_MEMORY", "build_model", "choose_attention", "collect", "main", "run"]

AnyJob = TypeVar("AnyJob", Job, BenchJob)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Failed allocations that PyTorch reports as plain RuntimeErrors: host memory, driver, cuBLAS.
MEMORY_MESSAGES = ("can't allocate memory", "error: out of memory", "STATUS_ALLOC_FAILED")


def main(train: Callable[[Job], PointResult]) -> None:
    """Train the point whose job the command line names, see `run`."""
    run(train, Job)


def run(work: Callable[[AnyJob], PointResult | BenchResult], kind: type[AnyJob]) -> None:
    """Do `work` with the job named on the command line; the first rank writes its result.

    Exits with OUT_OF_MEMORY when memory ran out, so that the host can try a smaller microbatch,
    and with 1 after any other failure, whose traceback goes to stderr.
    """
    # Composer handles SIGTERM by unwinding, which waits for collectives that never end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _run(work, kind)
    except Exception as error:
        traceback.print_exc()
        status = OUT_OF_MEMORY if is_out_of_memory(error) else 1
        sys.stdout.flush()
        sys.stderr.flush()
        # Exit handlers of the collectives would wait for the other ranks.
        os._exit(status)


@record
def _run(work: Callable[[AnyJob], PointResult | BenchResult], kind: type[AnyJob]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True, help="JSON file that describes the point")
    job = load_json(parser.parse_args().job, kind)
    result = work(job)
    if int(os.environ.get("RANK", "0")) == 0:
        write_atomically(Path(job.out) / "result.json", result.model_dump_json(indent=1) + "\n")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether `error` means that a smaller microbatch might work."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MEMORY_MESSAGES)


def choose_attention(job: Job, device: torch.device) -> str:
    """Return the kernel of `twinrun.train.attention` that this job's attention runs on."""
    if job.training.attention == "math":
        return "math"
    dtype = DTYPES[job.training.precision]
    return attention.fastest(job.shape, sequences=job.microbatch, dtype=dtype, device=device)


def build_model(job: Job, device: torch.device) -> MPT:
    """Return the initial model on `device`, the same at every world size, compiled if asked."""
    training = job.training
    with torch.device(device):
        model = MPT(
            job.shape,
            dtype=DTYPES[training.precision],
            attention=training.attention,
            checkpointing=training.activation_checkpointing,
        )
    model.initialise(training.seed)
    if training.compile:
        model.compile_regions()
    return model


def count_parameters(job: Job) -> int:
    """Count on the meta device, where a sharded model is still whole."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in MPT(job.shape).parameters())


def collect(
    job: Job, *, meter: Meter, device: torch.device, kernel: str, parallelism: str, data_hash: str
) -> PointResult:
    """Return what this point measured; every rank must call it."""
    return PointResult(
        point=job.point,
        parameters=count_parameters(job),
        microbatch=job.microbatch,
        steps=tuple(meter.steps),
        peak_memory_bytes=largest_over_ranks(devices.peak_memory_bytes(device), device),
        device_name=devices.name(device),
        device_memory_bytes=devices.memory_bytes(device),
        attention_backend=kernel,
        parallelism=parallelism,
        data_hash=data_hash,
        order_hash=meter.order_hash,
        libraries=devices.libraries(device),
    )
