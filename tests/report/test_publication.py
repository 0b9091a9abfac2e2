"""Tables of all records: the page of a publication by its figures, and the rows of README.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.records import PROJECT, bench_record
from tests.report.committed import newest
from twinrun.report.site import documents, publication_page, publication_rows, with_figures
from twinrun.report.words import headline

TRAINING = newest("mpt7b-scaling")
BENCH = bench_record({"scan-forward-fp16": [1.0] * 20})
VERDICTS = {one.plan.recipe: one.verdicts for one in (TRAINING, BENCH)}


def test_every_claim_of_every_publication_is_on_one_page() -> None:
    rows = [row for key in documents(PROJECT) for row in publication_rows(key, PROJECT, {})]
    recipes = PROJECT.recipes().values()
    claims = [claim.id for one in recipes for claim in one.published.restated.values()]
    claims += [claim.id for one in recipes for claim in one.published.score_difference]
    assert sorted(row.claim.id for row in rows) == sorted(claims)
    assert not [row for row in rows if row.judged]


def test_a_row_has_what_records_and_predictions_say_as_multiples() -> None:
    rows = {row.claim.id: row for row in publication_rows("002", PROJECT, VERDICTS)}
    one_node = rows["throughput-1-node"]
    assert one_node.figure == "Figure 5: mpt7b-scaling"
    assert one_node.cells[1:3] == ("◆ 166 TFLOP/s per card", "● 50.0 % MFU")
    measured, predicted = one_node.marks
    # 495 of 989.5 TFLOP/s here, 166 of 362.1 as published.
    assert measured.value == pytest.approx(495 / 989.5 / (166 / 362.1), rel=1e-3)
    assert predicted.low < predicted.value < predicted.high
    # A time is better when it is lower: 2.7 ms as published, 1 ms here.
    scan = {row.claim.id: row for row in publication_rows("001", PROJECT, VERDICTS)}["scan-forward-mi250"]
    assert [one.value for one in scan.marks if one.kind == "measured"] == ([2.7] if scan.judged else [])


def test_the_page_groups_claims_by_figure() -> None:
    page = publication_page("002", "A & B", publication_rows("002", PROJECT, VERDICTS))
    assert "A &amp; B" in page
    heads = [line for line in page.splitlines() if line.startswith("### ")]
    assert len(heads) == len(set(heads))
    assert {"### Table 2: mpt-chinchilla", "### Figure 5: mpt7b-scaling"} <= set(heads)
    assert " of 4 claims judged" in page


PAGE = "before\n<!-- figures -->\nold\n<!-- end of figures -->\nafter\n"


def test_each_record_that_stands_for_a_recipe_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        type(PROJECT), "results", lambda _, one: [Path("a")] if one.recipe.name == "mpt7b-scaling" else []
    )
    monkeypatch.setattr("twinrun.report.site.read_record", lambda *_: TRAINING)
    text = with_figures(PAGE, PROJECT)
    (row,) = (line for line in text.splitlines() if line.startswith("| `mpt7b-scaling` | 50.0%"))
    assert row.endswith(f" | {headline(TRAINING)} | 2026-11-21 |")
    assert "\nold\n" not in text
    assert with_figures(text, PROJECT) == text
    monkeypatch.setattr(type(PROJECT), "results", lambda *_: [])
    assert "No record of a run on GPUs is committed yet." in with_figures(PAGE, PROJECT)
