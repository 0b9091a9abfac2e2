"""The kernels are tested where torch is, through the emulator on any machine and natively on a GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HAS_TORCH = find_spec("torch") is not None


def _sees_gpu() -> bool:
    if not HAS_TORCH:
        return False
    import torch

    return bool(torch.cuda.is_available())


# Compiling needs no torch.
if not HAS_TORCH:
    standalone = {f"test_{name}.py" for name in ("compile", "portable", "races")}
    collect_ignore = [path.name for path in HERE.glob("test_*.py") if path.name not in standalone]
# Triton chooses its interpreter when it is imported: test_ssd_interpreted.py starts these in a new process.
elif "TRITON_INTERPRET" in os.environ or _sees_gpu():
    collect_ignore = ["test_ssd_interpreted.py"]
else:
    collect_ignore = ["test_ssd_numerics.py"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what runs compiled on a GPU, where there is one."""
    if _sees_gpu() and item.path.stem in {"test_ssd_numerics", "test_ssd_api", "test_ssd_layer"}:
        item.add_marker("gpu")


@pytest.fixture(autouse=HAS_TORCH)
def poisoned_memory() -> Iterator[None]:
    """Fill with NaN whatever kernels should write."""
    from twinrun.train.measure import poisoned

    with warnings.catch_warnings():
        # References may sum in any order.
        warnings.filterwarnings("ignore", ".*deterministic", UserWarning)
        with poisoned():
            yield


@pytest.fixture
def fresh() -> Iterator[None]:
    """Choose backends anew within a test, and again after it."""
    from twinrun_mamba import launch, registry

    launch.launcher.cache_clear()
    registry.code_objects.cache_clear()
    yield
    launch.launcher.cache_clear()
    registry.code_objects.cache_clear()
