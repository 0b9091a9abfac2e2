"""Gradients are clipped as Composer does it, without the imports of all its algorithms."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("composer")

import torch
from composer.algorithms.gradient_clipping import apply_gradient_clipping
from torch import nn

from twinrun.train.composer_loop import clip_norm

LOADED = (
    "import sys, twinrun.train.composer_loop;"
    "print(*(name for name in ('composer.algorithms', 'torchao') if name in sys.modules))"
)


@pytest.mark.parametrize("most", [1e-3, 1e3])
def test_the_norm_is_clipped_as_composer_does(most: float) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(17)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        model(torch.randn(4, 8)).sum().backward()
        models.append(model)
    clip_norm(models[0], most)
    apply_gradient_clipping(models[1], "norm", most, fsdp_enabled=False)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_a_rank_does_not_import_what_it_does_not_use() -> None:
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
