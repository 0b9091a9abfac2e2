"""The frame of a recipe's script: job in, result or exit status out; and what training scripts share."""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import numpy
import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from twinrun.foundation.errors import MachineError, RunError, TwinrunError
from twinrun.foundation.manifest import load_json
from twinrun.foundation.processes import end_with_parent
from twinrun.protocol.job import FOLLOWING, OUT_OF_MEMORY, REFUSED, STOPPED, Result
from twinrun.protocol.training import TrainingJob, TrainingResult
from twinrun.train import attention, float8, forks, liveness, ranks
from twinrun.train import device as devices
from twinrun.train.binding import bind
from twinrun.train.job_files import AnyJob, job_argument, report_rank, start_over, write_result, write_stop
from twinrun.train.metrics import Meter
from twinrun.train.models import DTYPES, Model, family_of

# Integers of the size of a parameter, for its bits.
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
CHUNK = 1 << 24
# Failed allocations that PyTorch reports as plain RuntimeErrors: host memory, driver, cuBLAS.
MEMORY_MESSAGES = ("can't allocate memory", "error: out of memory", "STATUS_ALLOC_FAILED")


def main(
    train: Callable[[TrainingJob], TrainingResult], *, load: Callable[[TrainingJob], object] | None = None
) -> None:
    """Train the point whose job the command line names, and its control runs after it; see `run`."""
    run(functools.partial(_with_controls, train), TrainingJob, load=load)


def _with_controls(train: Callable[[TrainingJob], TrainingResult], job: TrainingJob) -> TrainingResult:
    result = train(job)
    controls = []
    for number in range(1, job.training.controls + 1):
        # The run before holds models and loaders in cycles.
        gc.collect()
        control = train(job.model_copy(update={"control": number, "checkpointing": None}))
        controls.append(tuple(step.loss for step in control.steps))
    return result.model_copy(update={"controls": tuple(controls)})


def run(
    work: Callable[[AnyJob], Result],
    kind: type[AnyJob],
    *,
    load: Callable[[AnyJob], object] | None = None,
) -> None:
    """Do `work` with the job named on the command line; the first rank writes its result.

    Where the host has further points for the same ranks, each is done in a fork: see `twinrun.train.forks`.

    Exits with OUT_OF_MEMORY when memory ran out, so that the host can try what needs less, with STOPPED
    where the ranks were told to end and have saved, and with 1 after any other failure, told on stderr.

    Args:
        load: imports what `work` needs for a job, once for all points of the same ranks.
    """
    # Ranks whose launcher was killed must not train on: who resumes the run would train beside them.
    end_with_parent(signal.SIGKILL)
    # Composer handles SIGTERM by unwinding, which waits for collectives that never end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        file, forked_from, following = job_argument(), None, os.environ.pop(FOLLOWING, None)
        if following:
            if load:
                load(load_json(file, kind))
            file, forked_from = forks.next_job(file, Path(following))
            # As in a process that starts, whose draws without a seed are nobody else's.
            torch.default_generator.seed()
            numpy.random.seed()
        _run(work, load_json(file, kind), forked_from=forked_from)
    except Exception as error:
        if isinstance(error, TwinrunError):
            sys.stderr.write(f"{error}\n")
        else:
            traceback.print_exc()
        refused = REFUSED if isinstance(error, MachineError) else 1
        _leave(OUT_OF_MEMORY if is_out_of_memory(error) else refused)


@record
def _run(work: Callable[[AnyJob], Result], job: AnyJob, *, forked_from: int | None) -> None:
    # First of all: file systems and drivers, which the next lines ask, may hang.
    liveness.watch(job)
    if ranks.rank() == 0:
        # A scheduler may have started the ranks before, and ended them.
        start_over(job)
    report_rank(job, binding=bind() if job.accelerator else None, forked_from=forked_from)
    try:
        result = work(job)
    except ranks.TrainingStoppedError as stopped:
        if ranks.rank() == 0:
            write_stop(job, stopped.step)
        liveness.end()
        _leave(STOPPED)
    if ranks.rank() == 0:
        write_result(job, result)
    liveness.end()
    end()


def end() -> NoReturn:
    """End a rank whose work is done: run the exit handlers, and take no process group down.

    `destroy_process_group` holds the interpreter's lock while it waits for a thread of Gloo, and that thread
    may need the lock to free tensors. An interpreter that ends aborts on the thread: pytorch issue 190489.
    """
    atexit._run_exitfuncs()
    _leave(0)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit handlers of the collectives would wait for the other ranks.
    os._exit(status)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether `error` means that a smaller microbatch might work."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MEMORY_MESSAGES)


def choose_attention(job: TrainingJob, device: torch.device) -> str:
    """Return the kernel of `twinrun.train.attention` that this job's attention runs on."""
    shape = job.shape
    if not shape.attention_heads():
        return attention.NONE
    if job.training.attention != "sdpa":
        return job.training.attention
    return attention.fastest(
        (job.microbatch, shape.sequence, shape.attention_heads(), shape.head_size()),
        key_heads=shape.key_heads(),
        dtype=DTYPES[job.training.precision],
        device=device,
        alibi=bool(getattr(shape, "alibi", None)),
    )


def build_model(job: TrainingJob, device: torch.device) -> Model:
    """Return the initial model on `device`, the same at every world size, compiled if asked."""
    with torch.device(device):
        model = make_model(job)
    initialise(model, job)
    if job.training.compile:
        alone = job.world_size == 1 and job.sharding == "none"
        model.compile_whole() if alone else model.compile_regions()
    return model


def initialise(model: Model, job: TrainingJob) -> None:
    """Fill a whole model with its initial weights; a control run has them in another order of features."""
    model.initialise(job.training.seed)
    if job.control:
        model.renumber(job.control)


def count_parameters(job: TrainingJob) -> int:
    """Count on the meta device, where a sharded model is still whole."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make_model(job).parameters())


def check_parameters(job: TrainingJob) -> None:
    """Raise RunError where the model that is about to train is not the one that the manifest counts."""
    demand_parameters(job, count_parameters(job))


def demand_parameters(job: TrainingJob, found: int) -> None:
    """Raise RunError where `found` is not the number of parameters that the job's shape has."""
    if found != (expected := job.shape.parameters()):
        raise RunError(
            "the model of the script is not the one of the manifest",
            place=job.point,
            found=f"{found:,} parameters",
            allowed=f"{expected:,} by the closed form of `{job.shape.family}`",
            hint="change the model, or its sizes under [models] of recipe.toml",
        )


def digest_of(model: Model) -> str:
    """Return a digest of the bits of all parameters of a whole model, summed where they are."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        words = parameter.detach().flatten().view(WORDS[parameter.dtype])
        total = 0
        for begin in range(0, len(words), CHUNK):
            part = words[begin : begin + CHUNK].to(torch.int64)
            # Each place has a factor of its own, so that values which change places count.
            places = torch.arange(begin, begin + len(part), device=part.device)
            total += int((part * (2 * places + 1)).sum().item())
        digest.update(f"{model.drawn_name(name)} {tuple(parameter.shape)} {total};".encode())
    return digest.hexdigest()


def collect(
    job: TrainingJob,
    *,
    model: nn.Module | None,
    meter: Meter,
    device: torch.device,
    kernel: str,
    parallelism: str,
    data_hash: str,
    weights_hash: str,
    changes: Mapping[str, str],
    data_server: str | None = None,
) -> TrainingResult:
    """Return what this point measured; every rank must call it.

    Args:
        model: what trained, its parameters whole or sharded by FSDP2; None where `make_model` made it and the
            ranks split it in a way of their own.

    Raises:
        RunError: the model has another number of parameters than the manifest says.
    """
    parameters = count_parameters(job) if model is None else sum(one.numel() for one in model.parameters())
    demand_parameters(job, parameters)
    (peak,) = ranks.largest([devices.peak_memory_bytes(device)], device)
    power = meter.power.source()
    meter.power.end()
    return TrainingResult(
        point=job.point,
        parameters=parameters,
        reported=tuple(meter.reported),
        validation=tuple(meter.validation),
        blocked_seconds=tuple(meter.blocked),
        microbatch=job.microbatch,
        steps=tuple(meter.steps),
        peak_memory_bytes=int(peak),
        device_name=devices.name(device),
        device_memory_bytes=devices.memory_bytes(device),
        attention_backend=kernel,
        fp8_recipe=float8.described(job),
        parallelism=parallelism,
        data_hash=data_hash,
        data_server=data_server,
        order_hash=meter.order_hash,
        weights_hash=weights_hash,
        changes=dict(changes),
        libraries=devices.libraries(device),
        power=power,
    )


def make_model(job: TrainingJob) -> Model:
    """Return the model of `job` on the current device, its parameters not initialised."""
    model = family_of(job.shape).build(job.shape, training=job.training)
    if job.training.precision == "fp8":
        float8.convert(model.blocks, job)
    return model
