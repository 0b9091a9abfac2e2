"""The learning rate against its closed form at the points that matter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from twinrun.protocol.training import Optimizer, TokenSchedule
from twinrun.train.building import adamw, learning_rate

SETTINGS = Optimizer(learning_rate=2.0, warmup_steps=10, decay_steps=110, final_factor=0.1)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.0), (5, 1.0), (10, 2.0), (60, 1.1), (110, 0.2), (1000, 0.2)]
)
def test_rate_is_linear_then_cosine(step: int, rate: float) -> None:
    assert learning_rate(step, SETTINGS, step_tokens=7) == pytest.approx(rate)


# The published schedule, in tokens: github:lightonai/composer@3b01fc0013c5:mamba/config.yaml
PUBLISHED = Optimizer(
    learning_rate=4.5e-4,
    schedule=TokenSchedule(warmup=1006878720, total=10068787200, decay=1006878720),
    final_factor=0.1,
)


@pytest.mark.parametrize(
    ("tokens", "factor"),
    [(0, 0.0), (503439360, 0.5), (1006878720, 1.0), (9061908480, 1.0), (9565347840, 0.5), (10**10, 0.1)],
)
def test_rate_in_tokens_is_that_of_the_published_scheduler(tokens: int, factor: float) -> None:
    rate = learning_rate(1, PUBLISHED, step_tokens=tokens)
    assert rate == pytest.approx(4.5e-4 * factor)


def test_matrices_alone_decay_where_that_is_asked_for() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    settings = SETTINGS.model_copy(update={"decayed": "matrices", "weight_decay": 0.1})
    decayed, kept = adamw(model, settings).param_groups
    assert [list(one.shape) for one in decayed["params"]] == [[3, 2]]
    assert (decayed["weight_decay"], kept["weight_decay"], len(kept["params"])) == (0.1, 0.0, 3)
    assert len(adamw(model, SETTINGS).param_groups) == 1
