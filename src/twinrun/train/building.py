"""The initial model of a job, the same at every world size, and what it is held against."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from twinrun.foundation.errors import InputError, RunError
from twinrun.parity.controls import renumber
from twinrun.protocol.digests import Tracer
from twinrun.protocol.training import Optimizer, TokenSchedule, TrainingJob
from twinrun.train import attention
from twinrun.train.models import DTYPES, Model, build_of

# Integers of the size of a parameter, for its bits.
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
CHUNK = 1 << 24


def make_model(job: TrainingJob) -> Model:
    """Return the model of `job` on the current device, its parameters not initialised."""
    model = build_of(job.shape)(job.shape, training=job.training)
    if job.training.precision == "fp8":
        convert_to_fp8(model.blocks, job)
    return model


def initial_model(job: TrainingJob, device: torch.device) -> Model:
    """Return the model on `device` with its initial weights; a control run has them in another order."""
    with torch.device(device):
        model = make_model(job)
    model.initialise(job.training.seed)
    if job.control:
        model.order = renumber(model, job.control, samples=False)
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
    size_BSHE = (job.microbatch, shape.sequence, shape.attention_heads(), shape.head_size())
    kind: dict[str, Any] = {"key_heads": shape.key_heads(), "alibi": bool(getattr(shape, "alibi", None))}
    return attention.fastest(size_BSHE, dtype=DTYPES[job.training.precision], device=device, **kind)


def demand_parameters(job: TrainingJob, found: int | None = None) -> int:
    """Return the parameters of the job's model; raises RunError where they are not those that its shape has.

    Args:
        found: counted on the meta device where not given, where a sharded model is still whole.
    """
    if found is None:
        with torch.device("meta"):
            found = sum(parameter.numel() for parameter in make_model(job).parameters())
    if found != (expected := job.shape.parameters()):
        message = "the model of the script is not the one of the manifest"
        hint = "change the model, or its sizes under [models] of recipe.toml"
        allowed = f"{expected:,} by the closed form of `{job.shape.family}`"
        raise RunError(message, place=job.point, found=f"{found:,} parameters", allowed=allowed, hint=hint)
    return found


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
    if job.checkpointing or framework != "torch":
        place, found = ("--checkpoint", "given") if job.checkpointing else ("framework", framework)
        raise InputError("cannot be traced", place=place, found=found, allowed="torch, without checkpoints")
    name = f"control-{job.control}" if job.control else "run"
    return Tracer(model, Path(job.out) / f"{name}.trace", order=model.order)


# AdamW and its learning rate, the same for the Composer recipes and the plain loop.
def adamw(
    model: nn.Module, settings: Optimizer, *, groups: list[dict[str, Any]] | None = None
) -> torch.optim.AdamW:
    """Return AdamW with its fused kernel where this device and PyTorch have one.

    Weight decay is multiplied by the learning rate, which Composer's decoupled AdamW does not do;
    at the published weight decay of 0 both are the same.
    """
    chosen, fused = groups or parameter_groups(model, settings), next(model.parameters()).is_cuda
    kind: dict[str, Any] = {"betas": settings.betas, "eps": settings.epsilon, "fused": fused}
    return torch.optim.AdamW(chosen, settings.learning_rate, weight_decay=settings.weight_decay, **kind)


def parameter_groups(model: nn.Module, settings: Optimizer) -> list[dict[str, Any]]:
    """Return one group of all parameters, or the matrices that decay and the rest, which does not."""
    if settings.decayed == "all":
        return [{"params": list(model.parameters())}]
    apart = getattr(model, "undecayed", ())
    named = [(one.dim() >= 2 and not name.endswith(apart), one) for name, one in model.named_parameters()]
    decayed, kept = ([one for chosen, one in named if chosen is wanted] for wanted in (True, False))
    return [{"params": decayed}, {"params": kept, "weight_decay": 0.0}]


def learning_rate(step: int, settings: Optimizer, *, step_tokens: int) -> float:
    """Return the learning rate of the `step`-th update, counted from 0, after as many steps of tokens.

    Linear, then cosine; or linear, stable, linear in tokens. The first update has rate 0, as in Composer's
    CosineAnnealingWithWarmupScheduler.
    """
    if settings.schedule is not None:
        factor = _factor(step * step_tokens, settings.schedule)
        least = settings.final_factor if step * step_tokens >= settings.schedule.warmup else 0.0
        return settings.learning_rate * max(least, factor)
    assert settings.warmup_steps is not None and settings.decay_steps is not None  # noqa: PT018
    if step < settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    cosine_steps = max(1, settings.decay_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / cosine_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * (settings.final_factor + (1 - settings.final_factor) * cosine)


def _factor(tokens: int, schedule: TokenSchedule) -> float:
    """Return the learning rate over its peak, without the minimum."""
    if tokens < schedule.warmup:
        return tokens / schedule.warmup
    left = schedule.total - tokens
    return 1.0 if left >= schedule.decay else max(0.0, left / schedule.decay)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in every parameter group from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def convert_to_fp8(blocks: nn.Module, job: TrainingJob) -> None:
    """Let every linear layer of `blocks` multiply in fp8; a processor computes the rounded factors in fp32.

    Raises:
        MachineError: the interpreter of the ranks has no torchao.
    """
    float8 = attention.package(
        "torchao.float8",
        place="--set precision",
        found="fp8",
        allowed="bf16, fp32, or an environment with torchao",
        hint="--engine venv installs the lock of a stack that has it",
    )
    recipe = float8.Float8LinearConfig.from_recipe_name(job.training.fp8_recipe)
    float8.convert_to_float8_training(blocks, config=replace(recipe, emulate=not job.accelerator))


def fp8_described(job: TrainingJob) -> str:
    """Return which recipe computes the products of `job`, empty where they are in another type."""
    if job.training.precision != "fp8":
        return ""
    where = "on the device" if job.accelerator else "emulated: rounded to fp8, multiplied in fp32"
    return f"torchao {job.training.fp8_recipe}, {where}"
