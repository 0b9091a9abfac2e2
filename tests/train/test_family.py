"""A second family is one module: neither trainer knows the first."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Literal

import pytest

pytest.importorskip("streaming", reason="needs the packages of a stack")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.train.small import SHAPE, MakeJob
from tests.train.test_scaling import losses, run_here
from twinrun.protocol.models import ModelShape
from twinrun.protocol.training import Training, TrainingJob
from twinrun.protocol.work import BlockWork, ModelWork, Product
from twinrun.train import models
from twinrun.train.models import IGNORED, Model


class BigramShape(ModelShape):
    formulas = ("model-flops/none",)
    family: Literal["bigram"] = "bigram"

    def parameters(self) -> int:
        return self.vocabulary**2

    def flops_per_token(self) -> int:
        return 0

    def work(self) -> ModelWork:
        table = Product(self.vocabulary, self.vocabulary, "columns")
        block = BlockWork((), vectors=0, width=0, hidden=0, kept=0, kept_products=0, kept_input=0)
        return ModelWork(
            block, layers=1, sequence=self.sequence, head=table, embedding=table.weights, tied=True
        )


class Bigram(Model):
    """Predicts a token from the one before, without attention."""

    def __init__(self, shape: BigramShape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(shape.vocabulary, shape.vocabulary)])

    def initialise(self, seed: int) -> None:
        nn.init.zeros_(self.blocks[0].weight)

    def compile_regions(self) -> None:
        pass

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits: Tensor = self.blocks[0](tokens)
        if targets is None:
            return logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def build(shape: BigramShape, *, training: Training) -> Bigram:
    return Bigram(shape)


@pytest.fixture
def job(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> TrainingJob:
    family = ModuleType(f"{models.__name__}.bigram")
    vars(family).update(build=build)
    monkeypatch.setitem(sys.modules, family.__name__, family)
    shape = BigramShape(vocabulary=SHAPE.vocabulary, sequence=SHAPE.sequence)
    return make_job().model_copy(update={"shape": shape})


@pytest.mark.parametrize("trainer", ["composer", "plain"])
def test_both_trainers_train_a_family_without_attention(trainer: str, job: TrainingJob) -> None:
    settings = job.training.model_copy(update={"trainer": trainer})
    result = run_here(job.model_copy(update={"training": settings}))
    assert result.parameters == job.shape.parameters()
    assert result.attention_backend == ("none" if trainer == "composer" else "chosen by PyTorch")
    assert losses(result)[0] == pytest.approx(torch.tensor(float(SHAPE.vocabulary)).log().item())
    assert losses(result)[-1] < losses(result)[0]
