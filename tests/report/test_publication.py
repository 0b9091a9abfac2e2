"""The page of a publication: what is published, measured and predicted, by the publication's own figures."""

from __future__ import annotations

from tests.records import PROJECT
from twinrun.report.publication import documents, publication_page, publication_rows
from twinrun.report.summary import selected
from twinrun.results.reading import read_record

NAMES = ("mpt7b-scaling", "mamba-kernels")
RECORDS = {
    name: selected([read_record(file, PROJECT) for file in PROJECT.results(PROJECT.recipe(name))])
    for name in NAMES
}
VERDICTS = {name: [two for one in found for two in one.verdicts] for name, found in RECORDS.items()}


def test_every_claim_of_every_publication_is_on_one_page() -> None:
    rows = [row for key in documents(PROJECT) for row in publication_rows(key, PROJECT, {})]
    recipes = PROJECT.recipes().values()
    claims = [claim.id for one in recipes for claim in one.published.restated.values()]
    claims += [claim.id for one in recipes for claim in one.published.score_difference]
    assert sorted(row.claim.id for row in rows) == sorted(claims)
    assert not [row for row in rows if row.verdicts]


def test_a_row_has_what_records_and_predictions_say_as_multiples() -> None:
    rows = {row.claim.id: row for row in publication_rows("002", PROJECT, VERDICTS)}
    one_node = rows["throughput-1-node"]
    assert one_node.figure == "Figure 5: mpt7b-scaling"
    assert one_node.cells()[1] == "◆ 166 TFLOP/s per card"
    decided = [one.here for one in one_node.verdicts if one.here and one.here.measured]
    measured = [one.value for one in one_node.marks() if one.kind == "measured"]
    assert measured == [one.measured / one.published for one in decided if one.measured]
    (predicted,) = (one for one in one_node.marks() if one.kind == "predicted")
    assert predicted.low < predicted.value < predicted.high
    # A time is better when it is lower; its restatement is a share of the bound, which is better when higher.
    scan = {row.claim.id: row for row in publication_rows("001", PROJECT, VERDICTS)}["scan-forward-mi250"]
    assert all(one.value > 1 for one in scan.marks() if one.kind == "measured")


def test_the_page_groups_claims_by_figure() -> None:
    page = publication_page("002", "A & B", publication_rows("002", PROJECT, VERDICTS))
    assert "A &amp; B" in page
    heads = [line for line in page.splitlines() if line.startswith("### ")]
    assert len(heads) == len(set(heads))
    assert {"### Table 2: mpt-chinchilla", "### Figure 5: mpt7b-scaling"} <= set(heads)
    assert "2 of 4 claims judged" in page or "3 of 4 claims judged" in page
