"""What a rank waits for when it starts, which those of a CPU share its cores for."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("streaming")

from tests.contracts.tree import loaded_by


@pytest.mark.parametrize(
    ("modules", "used"),
    [
        (("plain_loop", "layout_loop", "data_parallel"), set()),
        (("layout_loop", "deepspeed_adapter"), {"deepspeed"}),
        (("composer_loop", "composer_adapter"), {"composer", "torchvision"}),
    ],
    ids=("torch alone", "DeepSpeed", "Composer"),
)
def test_a_rank_loads_no_framework_but_its_own(modules: tuple[str, ...], used: set[str]) -> None:
    for name in used:
        pytest.importorskip(name)
    names = ", ".join(f"twinrun.train.{module}" for module in modules)
    # PyTorch's optimizers load its tracer and Triton; its compiler starts a process beside the rank.
    compiler = "torch._inductor.async_compile"
    asked = "import deepspeed.runtime.zero.muon.muon_optimizer" if "deepspeed" in used else ""
    code = f"import {names}, sys\n{asked}\nassert {compiler!r} not in sys.modules"
    assert loaded_by(code) - {"triton"} == {"torch", *used}


def test_composer_is_loaded_without_plots_and_platforms() -> None:
    """What is left out is there for whoever imports it later."""
    pytest.importorskip("composer")
    left_out = {"matplotlib", "transformers", "mcli"}
    code = f"""import twinrun.train.composer_adapter, sys
from composer.core import Event, engine
for order in engine._get_default_passes():
    assert order(["an algorithm"], Event.FIT_START) == ["an algorithm"]
assert not {left_out!r} & sys.modules.keys()
assert "composer.algorithms" not in sys.modules
import mcli, torchmetrics
from composer.algorithms import EMA
assert mcli.__version__ and torchmetrics.functional.text.bleu_score and EMA
"""
    loaded_by(code)
