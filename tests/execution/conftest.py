"""Fixtures of the training side for the tests of clusters."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("streaming"):
    from tests.train.small import corpus_folder, make_job  # noqa: F401 - fixtures
