"""Quantised training: its three products by hand, a run that resumes, and layouts that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("streaming", reason="needs the packages of a stack")

import torch
from formats import FORMATS, quantised
from products import QuantisedProducts, Quantiser, Settings, quantise

from tests.train.checkpoint_jobs import digests, saving
from tests.train.small import LOADED, STEPS, MakeJob, launch
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import load_json, validate
from twinrun.protocol.layout import Layout
from twinrun.protocol.training import TrainingResult

SCRIPT = Path(__file__).parents[1] / "train.py"
PRODUCTS = ("forward", "input_gradient", "weight_gradient")
ROUNDING = {"hadamard": "random", "hadamard_size": 16, "rounding": "stochastic"}
SETTINGS = {**dict.fromkeys(PRODUCTS, True), "format": "mxfp4", "block": 16, **ROUNDING}


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
    ("changes", "place"),
    [
        ({"format": "mxfp6"}, "format"),
        ({"hadamard_size": 24}, "hadamard_size"),
        ({"roundings": "nearest"}, "roundings"),
        ({"rounding": None}, "rounding"),
        ({"block": 64}, "block"),
        ({"hadamard_size": 64}, "hadamard_size"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, object], place: str) -> None:
    def start() -> None:
        settings = validate(SETTINGS | changes, Settings, place="settings")
        quantiser = Quantiser(settings, seed=1, rank=0, device=torch.device("cpu"))
        quantise(torch.nn.ModuleList([torch.nn.Linear(96, 96)]), quantiser, tokens=96, place="settings")

    with pytest.raises(InputError) as caught:
        start()
    assert place in str(caught.value.place)
