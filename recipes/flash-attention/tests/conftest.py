"""The kernels are tested where torch and Triton are: in Triton's interpreter, or compiled on a GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HAS_TRITON = find_spec("torch") is not None and find_spec("triton") is not None
HERE = Path(__file__).parent
# Triton reads it when it is imported: test_attention_interpreted.py starts these in a process of their own.
INTERPRETED = "TRITON_INTERPRET" in os.environ
ON_GPU = not INTERPRETED and HAS_TRITON and __import__("torch").cuda.is_available()
if not HAS_TRITON:
    collect_ignore = [path.name for path in HERE.glob("test_attention_*.py")]
elif INTERPRETED or ON_GPU:
    collect_ignore = ["test_attention_interpreted.py"]
else:
    collect_ignore = ["test_attention_numerics.py", "test_attention_api.py"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what runs compiled on a GPU, where there is one."""
    if ON_GPU and item.path.stem in {"test_attention_numerics", "test_attention_api"}:
        item.add_marker("gpu")
