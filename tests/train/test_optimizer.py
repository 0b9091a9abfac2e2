"""The learning rate against its closed form at the points that matter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from twinrun.protocol.training import Optimizer
from twinrun.train.optimizer import adamw, learning_rate, set_learning_rate

SETTINGS = Optimizer(learning_rate=2.0, warmup_steps=10, decay_steps=110, final_factor=0.1)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.0), (5, 1.0), (10, 2.0), (60, 1.1), (110, 0.2), (1000, 0.2)]
)
def test_rate_is_linear_then_cosine(step: int, rate: float) -> None:
    assert learning_rate(step, SETTINGS) == pytest.approx(rate)


def test_rate_equals_that_of_composers_scheduler() -> None:
    composer = pytest.importorskip("composer.optim.scheduler")
    for step in range(10, 120, 7):
        progress = min(1.0, (step - 10) / 100)
        theirs = 2.0 * composer._cosine_anneal(x=progress, min_y=0.1)
        assert learning_rate(step, SETTINGS) == pytest.approx(theirs)


def test_without_warmup_the_first_rate_is_the_largest() -> None:
    settings = Optimizer(learning_rate=1.0, warmup_steps=0, decay_steps=10)
    rates = [learning_rate(step, settings) for step in range(11)]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)


def test_rate_reaches_the_update() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = adamw([weight], SETTINGS)
    set_learning_rate(optimizer, 0.5)
    weight.grad = torch.ones(1)
    optimizer.step()
    # The first update of Adam is the learning rate, against the sign of the gradient.
    assert weight.item() == pytest.approx(-0.5)
