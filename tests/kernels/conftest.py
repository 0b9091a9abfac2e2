"""The kernels are tested where torch is, through the emulator on any machine and natively on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch
    from twinrun_mamba import launch, memory, registry

    # The grids as a whole, for both waves; else every case of the shorter lengths for one of them.
    WHOLE = os.environ.get("TWINRUN_WHOLE_GRID") == "1"
    WAVES = ("emulated-32", "emulated-64")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what needs a GPU that is not there."""
    for item in items:
        if "gpu" in item.keywords and "tests/kernels" in item.nodeid and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU here"))


@pytest.fixture(scope="session", autouse=True)
def emulator() -> None:
    """Build the emulator from the sources as they are, unless other code objects are named."""
    if "TWINRUN_MAMBA_OBJECTS" not in os.environ:
        from twinrun_mamba import compile as compiler

        missing = compiler.build(["cpu"])
        assert not missing, missing


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill with NaN whatever kernels should write."""
    memory.poisoned = True
    yield
    memory.poisoned = False


@pytest.fixture
def fresh() -> Iterator[None]:
    """Choose backends anew within a test, and again after it."""
    launch.launcher.cache_clear()
    registry.targets.cache_clear()
    yield
    launch.launcher.cache_clear()
    registry.targets.cache_clear()
