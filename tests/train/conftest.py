"""The training side is tested in an environment that has a stack's packages, and nowhere else."""

from importlib.util import find_spec

import pytest

if find_spec("streaming") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.train.small import corpus, corpus_folder, make_job  # noqa: F401 fixtures


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test of this folder."""
    item.add_marker("train")
