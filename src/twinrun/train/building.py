"""The initial model of a job, the same at every world size, and what it is held against."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from twinrun.foundation.errors import InputError, RunError
from twinrun.protocol.digests import Tracer
from twinrun.protocol.training import TrainingJob
from twinrun.train import attention, float8
from twinrun.train.models import DTYPES, Model, family_of

# Integers of the size of a parameter, for its bits.
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
CHUNK = 1 << 24


def make_model(job: TrainingJob) -> Model:
    """Return the model of `job` on the current device, its parameters not initialised."""
    model = family_of(job.shape).build(job.shape, training=job.training)
    if job.training.precision == "fp8":
        float8.convert(model.blocks, job)
    return model


def initial_model(job: TrainingJob, device: torch.device) -> Model:
    """Return the model on `device` with its initial weights; a control run has them in another order."""
    with torch.device(device):
        model = make_model(job)
    model.initialise(job.training.seed)
    if job.control:
        model.renumber(job.control)
    return model


def build_model(job: TrainingJob, device: torch.device) -> Model:
    """Return the initial model on `device`, compiled if asked."""
    model = initial_model(job, device)
    if job.training.compile:
        alone = job.world_size == 1 and job.sharding == "none"
        model.compile_whole() if alone else model.compile_regions()
    return model


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


def count_parameters(job: TrainingJob) -> int:
    """Count on the meta device, where a sharded model is still whole."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make_model(job).parameters())


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


def tracer_of(job: TrainingJob, model: Model) -> Tracer | None:
    """Return what traces the whole model of `job` before it is sharded; None where no trace is asked for.

    Raises:
        InputError: the parameters are cut, or the run may be resumed.
    """
    if not job.training.trace:
        return None
    framework = job.layout.framework if job.layout else "torch"
    for place, found, allowed in (
        ("framework", framework, "torch"),
        ("--checkpoint", "given" if job.checkpointing else "", ""),
    ):
        if found != allowed:
            raise InputError("cannot be traced", place=place, found=found, allowed=allowed or "none")
    name = f"control-{job.control}" if job.control else "run"
    order = (
        {key: (axes[0], axes[1]) for key, axes in model.numbering(job.control).items()}
        if job.control
        else None
    )
    return Tracer(model, Path(job.out) / f"{name}.trace", order=order)
