"""Outcomes of checks for other programs: JUnit XML, nodes that failed, and each node's health."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

from junitparser import Failure, JUnitXml, Skipped, TestCase, TestSuite

from twinrun.foundation.files import write_atomically
from twinrun.foundation.redaction import cleaned, leaving
from twinrun.protocol.checks import HEALTH_FILE, TEXTFILE, Health, NodeCheck, failed_nodes, textfile
from twinrun.protocol.measurements import Check
from twinrun.results.judged import Judged
from twinrun.results.reading import FinishedRun
from twinrun.workloads.workload import MeasuredPoint


def write_check_files(run: FinishedRun) -> None:
    """Write JUnit XML, the nodes for `srun --exclude`, and what operators' programs read."""
    checks = [check for point in run.record.points for check in point.checks]
    if checks:
        write_atomically(run.folder / "junit.xml", _junit(run.record))
        write_atomically(run.folder / "exclude.txt", ",".join(failed_nodes(checks)) + "\n")
        health = health_of(run.record)
        write_atomically(run.folder / TEXTFILE, textfile(health))
        write_atomically(run.folder / HEALTH_FILE, health.model_dump_json(indent=1) + "\n")


def _junit(record: Judged) -> str:
    root = JUnitXml(record.run)
    for point in record.points:
        suite = TestSuite(point.id)
        for one in point.checks:
            case = TestCase(one.id, classname=_printable(one.place), time=one.seconds or 0)
            if one.outcome != "pass":
                why = (Failure if one.outcome == "fail" else Skipped)(_printable(one.reason))
                why.text = _printable(one.remedy or "")
                case.result = [why]
            suite.add_testcase(case)
        root.add_testsuite(suite)
    return str(root.tostring().decode()) + "\n"


def _printable(text: str) -> str:
    """Return `text` without credentials and without what XML cannot hold."""
    clean = leaving(text)
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in clean)


def health_of(record: Judged) -> Health:
    """Return what a record of checks says of every node, and when its run began, as the run's name has it."""
    checks = ((point, check) for point in record.points for check in point.checks)
    found = tuple(one for point, check in checks for one in _of_nodes(point, check))
    began = datetime.datetime.fromtimestamp(0, datetime.UTC)
    with contextlib.suppress(ValueError):
        began = datetime.datetime.strptime(record.run[:15], "%Y%m%d-%H%M%S").replace(tzinfo=datetime.UTC)
    return Health(run=record.run, created=began.isoformat(timespec="seconds"), checks=found)


def _of_nodes(point: MeasuredPoint, check: Check) -> Iterator[NodeCheck]:
    """Yield a check for each node that it is about; one of several nodes fails at those that it names."""
    host, _, device = check.place.partition(", device ")
    said = cleaned({"reason": check.reason, "remedy": check.remedy})
    alone = host != "allocation" and not check.nodes
    for node in (host,) if alone else dict.fromkeys((*point.sent.hosts, *check.nodes)):
        if alone or node in check.nodes or not check.nodes:
            on = device if alone else ""
            yield NodeCheck(check=check.id, node=node, device=on, outcome=check.outcome, **said)
        else:
            yield NodeCheck(check=check.id, node=node, outcome="pass", reason="")
