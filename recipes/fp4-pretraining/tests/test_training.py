"""Quantised training: its three products by hand, a run that resumes, and layouts that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("streaming", reason="needs the packages of a stack")

import torch
from formats import FORMATS, quantised
from products import QuantisedProducts, Quantiser, Settings

from tests.checkouts import checkout
from tests.records import plan
from tests.train.checkpoint_jobs import digests, saving
from tests.train.small import LOADED, STEPS, MakeJob, launch
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import load_json
from twinrun.planning.project import Project
from twinrun.protocol.layout import Layout
from twinrun.protocol.training import TrainingResult

RECIPE = "fp4-pretraining"
SCRIPT = Path(__file__).parents[1] / "train.py"
PRODUCTS = ("forward", "input_gradient", "weight_gradient")
SETTINGS = {
    **dict.fromkeys(PRODUCTS, True),
    "format": "mxfp4",
    "block": 16,
    "hadamard": "random",
    "hadamard_size": 16,
    "rounding": "stochastic",
}


@pytest.mark.parametrize("chosen", ["", *PRODUCTS])
def test_a_product_has_quantised_factors_where_it_is_chosen(chosen: str) -> None:
    changes = {name: name == chosen for name in PRODUCTS} | {"hadamard": "none", "rounding": "nearest"}
    settings = Settings.model_validate(SETTINGS | changes)
    x, weight = torch.randn(32, 48, requires_grad=True), torch.randn(16, 48, requires_grad=True)
    grad = torch.randn(32, 16)

    def by_hand(a: torch.Tensor, b: torch.Tensor, name: str) -> torch.Tensor:
        if name == chosen:
            a, b = (quantised(one.contiguous(), FORMATS["mxfp4"], block=16) for one in (a, b))
        return a @ b.T

    y = QuantisedProducts.apply(x, weight, Quantiser(settings, seed=1, rank=0, device=torch.device("cpu")))
    y.backward(grad)
    assert torch.equal(y, by_hand(x, weight, "forward"))
    assert torch.equal(x.grad, by_hand(grad, weight.T, "input_gradient"))
    assert torch.equal(weight.grad, by_hand(grad.T, x.T, "weight_gradient"))


def test_a_run_goes_on_bit_for_bit(make_job: MakeJob, tmp_path: Path) -> None:
    layout = Layout(framework="quantised", settings=SETTINGS)
    losses, ends = [], []
    for _ in ("whole", "resumed"):
        job = make_job(sharding="none", trainer="quantised").model_copy(update={"layout": layout})
        ended = launch(SCRIPT, saving(job, tmp_path / "place"), modules=LOADED)
        assert ended.returncode == 0, ended.stderr[-4000:]
        result = load_json(Path(job.out) / "result.json", TrainingResult)
        losses.append([step.loss for step in result.steps])
        ends.append(digests(tmp_path / "place", STEPS))
        # The second run does the last steps again, from the checkpoint before.
        shutil.rmtree(tmp_path / "place" / f"step-{STEPS:08d}")
    assert losses[0] == losses[1]
    assert ends[0] == ends[1]
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('format = "mxfp8"', 'format = "mxfp6"', ("layouts.mxfp8.settings.format", "mxfp6", "nvfp4")),
        ("block = 32", "block = 64", ("layouts.mxfp8.settings.block", "64", "a divisor of 96")),
        ("hadamard_size = 16", "hadamard_size = 24", ("settings.hadamard_size", "24", "2, 4, 8, 16")),
        ("hadamard_size = 16", "hadamard_size = 64", ("settings.hadamard_size", "64", "a divisor of 96")),
        ('rounding = "nearest"', 'roundings = "nearest"', ("settings", "roundings", "rounding")),
        ('rounding = "nearest"', "", ("settings.rounding", "names every one", "stochastic")),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_the_plan(
    tmp_path: Path, old: str, new: str, words: tuple[str, ...]
) -> None:
    root = checkout(tmp_path, RECIPE)
    path = root / "recipes" / RECIPE / "recipe.toml"
    text = path.read_text(encoding="utf-8")
    sizes = "width = 96, heads = 4, groups = 4, layers = 1, hidden = 96, vocabulary = 320, sequence = 96"
    text = text.replace("[models]\n", f'[models]\nsmall = {{ family = "llama", {sizes} }}\n')
    text = text.replace('model = "llama-smoke"', 'model = "small"')
    begin = text.index("[layouts.mxfp8.settings]")
    path.write_text(text[:begin] + text[begin:].replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        plan(RECIPE, scale="smoke", gpu=None, devices=0, project=Project(root))
    assert all(word in str(caught.value) for word in words), caught.value
