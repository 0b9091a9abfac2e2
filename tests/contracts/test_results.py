"""Committed records name the code that ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contracts.tree import ROOT, shown

RECORDS = sorted(ROOT.glob("recipes/*/results/*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=shown)
def test_the_record_is_of_a_clean_commit(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["schema_version"] == 1:
        # Written before this was asked for.
        return
    assert record["revision"]["commit"], "commit, then run again"
    assert record["revision"]["changes_sha256"] is None, "commit what was changed, then run again"
