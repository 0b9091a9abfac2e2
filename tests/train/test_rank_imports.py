"""What a rank waits for when it starts, which those of a CPU share its cores for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("streaming")

from tests.contracts.tree import loaded_by
from tests.train.small import LOADED, READING, TRAINING, MakeJob, launch
from twinrun.foundation.manifest import load_json
from twinrun.protocol.training import TrainingResult

FRAMEWORKS = {"composer", "deepspeed"}


@pytest.mark.parametrize(
    ("modules", "used"),
    [
        (("loop", "data_parallel"), set()),
        (("composer_loop",), {"composer"}),
    ],
    ids=("torch alone", "Composer"),
)
def test_a_rank_loads_no_framework_but_its_own(modules: tuple[str, ...], used: set[str]) -> None:
    for name in used:
        pytest.importorskip(name)
    names = ", ".join(f"twinrun.train.{module}" for module in modules)
    assert loaded_by(f"import sys, {names}") & FRAMEWORKS == used


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        # What reads data costs seconds of a processor, which no bench and no check pays.
        ("bench, measure, loop, data_parallel", ("streaming", "transformers")),
        ("checks, training, rank", ("torch", "streaming")),
        ("composer_loop", ("composer.algorithms", "torchao", "streaming")),
    ],
)
def test_a_rank_does_not_import_what_it_does_not_use(modules: str, without: tuple[str, ...]) -> None:
    if modules == "composer_loop":
        pytest.importorskip("composer")
    code = f"import sys; from twinrun.train import {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(without) & set(done.stdout.split())


# PyTorch 2.4 has these elsewhere, where a later one still has them too.
OLD_PLACES = """
import sys
import torch.distributed._composable.fsdp, torch.distributed._tensor, torch.distributed.fsdp as later
for name in ("FSDPModule", "MixedPrecisionPolicy", "fully_shard"):
    delattr(later, name)
from twinrun.train import training
training.main()
"""


def test_fsdp2_is_found_where_older_releases_have_it(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OLD_PLACES)
    losses = []
    for script, modules in ((tmp_path / "train.py", READING), (TRAINING, LOADED)):
        job = make_job(trainer="plain", sharding="full", steps=2, warmup_steps=0)
        done = launch(script, job, modules=modules)
        assert done.returncode == 0, done.stderr[-2000:]
        result = load_json(Path(job.out) / "result.json", TrainingResult)
        assert result.parallelism == "fsdp2"
        losses.append([step.loss for step in result.steps])
    assert losses[0] == losses[1]
