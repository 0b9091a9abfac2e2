"""The Slurm of two nodes that all its tests share, and fixtures of the training side."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.execution.clusters import cluster
from twinrun.manifests.cluster import LoadedSite

if find_spec("streaming"):
    from tests.train.small import corpus_folder, make_job  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what nodes see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def site(folder: Path) -> Iterator[LoadedSite]:
    """Yield a cluster of two nodes, which every test leaves as it was."""
    with cluster(nodes=2, folder=folder) as site:
        yield site
