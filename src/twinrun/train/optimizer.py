"""AdamW and its learning rate, the same for the Composer recipe and the plain loop."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from twinrun.protocol.training import Optimizer


def adamw(parameters: Iterable[nn.Parameter], settings: Optimizer) -> torch.optim.AdamW:
    """Return AdamW with its fused kernel where this device and PyTorch have one.

    Weight decay is multiplied by the learning rate, which Composer's decoupled AdamW does not do;
    at the published weight decay of 0 both are the same.
    """
    parameters = list(parameters)
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=parameters[0].is_cuda,
    )


def learning_rate(step: int, settings: Optimizer) -> float:
    """Return the learning rate of the `step`-th update, counted from 0: linear, then cosine.

    The first update has rate 0, as in Composer's CosineAnnealingWithWarmupScheduler.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    cosine_steps = max(1, settings.decay_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / cosine_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * (settings.final_factor + (1 - settings.final_factor) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in every parameter group from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
