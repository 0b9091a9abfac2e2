"""Outcomes of checks as other programs read them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

from tests.records import training_record
from twinrun.export.check_files import write_check_files
from twinrun.protocol.measurements import Check
from twinrun.results.reading import FinishedRun

CHECKS = tuple(
    Check(id=f"a-{one}", outcome=one, place="b", nodes=("b", "a"), reason="it \x1b is so", seconds=2)
    for one in ("pass", "fail", "unknown")
)


def test_checks_leave_junit_and_the_nodes_to_exclude(tmp_path: Path) -> None:
    record = training_record({"nodes=1": 166.0})
    (point,) = record.points
    write_check_files(FinishedRun(record=record, folder=tmp_path, file=tmp_path / "record.json"))
    assert not list(tmp_path.iterdir())
    checked = dataclasses.replace(record, points=(dataclasses.replace(point, checks=CHECKS),))
    write_check_files(FinishedRun(record=checked, folder=tmp_path, file=tmp_path / "record.json"))
    assert (tmp_path / "exclude.txt").read_text() == "a,b\n"
    (suite,) = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert [suite.get(name) for name in ("tests", "failures", "skipped")] == ["3", "1", "1"]
    assert [[part.tag for part in case] for case in suite] == [[], ["failure"], ["skipped"]]
    assert suite[1][0].get("message") == "it ? is so"
