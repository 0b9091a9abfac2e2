"""What a rank waits for when it starts, which those of a CPU share its cores for."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("streaming")

from tests.contracts.tree import loaded_by

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
