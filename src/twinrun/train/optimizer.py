"""AdamW and its learning rate, the same for the Composer recipes and the plain loop."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from twinrun.protocol.training import Optimizer, TokenSchedule


def adamw(
    model: nn.Module, settings: Optimizer, *, groups: list[dict[str, Any]] | None = None
) -> torch.optim.AdamW:
    """Return AdamW with its fused kernel where this device and PyTorch have one.

    Weight decay is multiplied by the learning rate, which Composer's decoupled AdamW does not do;
    at the published weight decay of 0 both are the same.
    """
    return torch.optim.AdamW(
        groups or parameter_groups(model, settings),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=next(model.parameters()).is_cuda,
    )


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
    assert settings.warmup_steps is not None
    assert settings.decay_steps is not None
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
