"""What a rank waits for when it starts, which those of a CPU share its cores for."""

from __future__ import annotations

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
