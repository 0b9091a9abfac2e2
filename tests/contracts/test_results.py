"""Committed records name the code that ran."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.contracts.tree import ROOT, shown
from twinrun.planning.project import Project

STATEMENTS = {
    page.stem: page.read_text(encoding="utf-8") for page in ROOT.glob("docs/results/publications/*.md")
}
RECORDS = sorted(ROOT.glob("recipes/*/results/*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=shown)
def test_the_record_is_of_a_clean_commit(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    if record.get("converted_from"):
        # The run was before this was asked for.
        return
    assert record["revision"]["commit"], "commit, then run again"
    assert record["revision"]["changes_sha256"] is None, "commit what was changed, then run again"


def test_every_claim_stands_among_the_statements() -> None:
    listed = {
        (recipe, claim)
        for recipe, claims in re.findall(r"`([\w-]+)`: ((?:`[\w-]+`(?:, )?)+)", "".join(STATEMENTS.values()))
        for claim in re.findall(r"[\w-]+", claims)
    }
    claimed = set()
    for name, loaded in Project(ROOT).recipes().items():
        published = loaded.published
        # Statements are listed of publications that have a page, and of recipes that one of these names.
        if loaded.recipe.publication.key not in STATEMENTS and name not in {one for one, _ in listed}:
            continue
        claimed |= {(name, claim.id) for claim in published.claim}
        claimed |= {(name, claim.id) for claim in published.between_records}
        claimed |= {(name, claim.id) for claim in published.score_difference}
    assert listed == claimed


def test_every_file_that_a_statement_names_exists() -> None:
    named = re.findall(r"`((?:images|recipes|tests)/[^`]+)`", "".join(STATEMENTS.values()))
    assert named
    assert not [name for name in named if not any(ROOT.glob(name))]
