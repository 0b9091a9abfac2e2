"""Runs of every workload without an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkouts import checkout
from tests.cli.flow_sites import FlowSite, made
from tests.contracts.baking import bake
from twinrun.workloads import workload_names


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what bakes the recipe of a workload once; every test has a copy of it."""

    @functools.cache
    def recipe(workload: str) -> Path:
        root = checkout(tmp_path_factory.mktemp(workload))
        return root / bake(root, {"workload": workload}).folder

    return recipe


@pytest.fixture(params=workload_names())
def site(
    request: pytest.FixtureRequest,
    baked: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> FlowSite:
    return made(tmp_path, request.param, baked(request.param), monkeypatch)


@pytest.fixture
def evaluated(baked: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FlowSite:
    return made(tmp_path, "evaluation", baked("evaluation"), monkeypatch)


@pytest.fixture
def trained(baked: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FlowSite:
    return made(tmp_path, "training", baked("training"), monkeypatch)
