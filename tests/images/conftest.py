"""This machine's engine, and a small stack with all files that its build needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from docker import DockerClient

from tests.tiny_build import carried_checkout, open_engine
from tests.tiny_stack import Checkout


@pytest.fixture(scope="module")
def client() -> Iterator[DockerClient]:
    yield from open_engine()


@pytest.fixture(scope="module")
def checkout(client: DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return carried_checkout(tmp_path_factory.mktemp("tiny"))
