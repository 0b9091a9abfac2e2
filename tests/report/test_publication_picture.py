"""The picture of a publication: what is published, measured and predicted, each where its number puts it."""

from __future__ import annotations

import re

from tests.records import PROJECT
from twinrun.report.headline_picture import WIDTH
from twinrun.report.publication_picture import documents, draw_publication, publication_rows
from twinrun.report.summary import selected
from twinrun.results.reading import read_record

NAMES = ("mpt7b-scaling", "mamba-kernels")
RECORDS = {
    name: selected([read_record(file, PROJECT) for file in PROJECT.results(PROJECT.recipe(name))])
    for name in NAMES
}


def test_every_claim_of_every_publication_is_in_one_picture() -> None:
    rows = [row for key in documents(PROJECT) for row in publication_rows(key, PROJECT, {})]
    claims: list[str] = [
        claim.id
        for one in PROJECT.recipes().values()
        for claim in (
            *one.published.claim,
            *one.published.between_records,
            *one.published.score_difference,
        )
    ]
    assert sorted(row.claim for row in rows) == sorted(claims)
    assert not [row for row in rows if row.measured]


def test_a_row_has_what_records_and_predictions_say_as_multiples() -> None:
    rows = {row.claim: row for row in publication_rows("002", PROJECT, RECORDS)}
    one_node = rows["throughput-1-node"]
    assert one_node.published == "166 TFLOP/s per card"
    verdicts = [
        two for one in RECORDS["mpt7b-scaling"] for two in one.verdicts if two.claim == one_node.claim
    ]
    expected = [two.here.measured / two.here.published for two in verdicts if two.here and two.here.measured]
    assert [times for times, _ in one_node.measured] == expected
    assert one_node.predicted
    assert one_node.predicted[1] < one_node.predicted[0] < one_node.predicted[2]
    # A time is better when it is lower; its restatement is a share of the bound, which is better when higher.
    scan = {row.claim: row for row in publication_rows("001", PROJECT, RECORDS)}["scan-forward-mi250"]
    assert all(times and times > 1 for times, _ in scan.measured)


def test_texts_and_marks_lie_inside_the_picture() -> None:
    svg = draw_publication("A & B", publication_rows("002", PROJECT, RECORDS))
    assert "A &amp; B" in svg
    assert all(0 <= float(x) <= WIDTH for x in re.findall(r'c?x="([\d.]+)"', svg))
