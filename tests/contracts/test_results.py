"""Committed records name the code that ran."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from tests.contracts.tree import ROOT, shown
from twinrun.planning.project import Project

with (ROOT / "docs/statements.csv").open(encoding="utf-8", newline="") as file:
    STATEMENTS = list(csv.DictReader(file))
RECORDS = sorted(ROOT.glob("recipes/*/results/*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=shown)
def test_the_record_is_of_a_clean_commit(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    if record.get("converted_from"):
        # The run was before this was asked for.
        return
    assert record["revision"]["commit"], "commit, then run again"
    assert record["revision"]["changes_sha256"] is None, "commit what was changed, then run again"


def test_the_statements_are_of_publications_and_name_what_is_there() -> None:
    keys = {loaded.recipe.publication.key for loaded in Project(ROOT).recipes().values()}
    assert {one["publication"] for one in STATEMENTS} <= keys
    named = re.findall(r"`((?:images|recipes|tests)/[^`]+)`", "".join(one["held by"] for one in STATEMENTS))
    assert named
    assert not [name for name in named if not any(ROOT.glob(name))]
