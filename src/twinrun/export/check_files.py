"""Outcomes of checks for other programs: JUnit XML, and the nodes that a failed check names."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

from twinrun.export.node_health import health_of
from twinrun.foundation.files import write_atomically
from twinrun.foundation.text import without_credentials
from twinrun.protocol.checks import failed_nodes
from twinrun.protocol.health import HEALTH_FILE, TEXTFILE, textfile
from twinrun.results.finished_run import FinishedRun


def write_check_files(run: FinishedRun) -> None:
    """Write JUnit XML, the nodes for `srun --exclude`, and what operators' programs read."""
    checks = [check for point in run.record.points for check in point.checks]
    if checks:
        write_atomically(run.folder / "junit.xml", _junit(run))
        write_atomically(run.folder / "exclude.txt", ",".join(failed_nodes(checks)) + "\n")
        health = health_of(run.record)
        write_atomically(run.folder / TEXTFILE, textfile(health))
        write_atomically(run.folder / HEALTH_FILE, health.model_dump_json(indent=1) + "\n")


def _junit(run: FinishedRun) -> str:
    root = ElementTree.Element("testsuites", name=run.record.run)
    for point in run.record.points:
        counts = Counter(one.outcome for one in point.checks)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=point.id,
            tests=str(len(point.checks)),
            failures=str(counts["fail"]),
            skipped=str(counts["unknown"]),
        )
        for one in point.checks:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=_printable(one.place),
                name=one.id,
                time=f"{one.seconds or 0:.3f}",
            )
            if one.outcome != "pass":
                tag = "failure" if one.outcome == "fail" else "skipped"
                why = ElementTree.SubElement(case, tag, message=_printable(one.reason))
                why.text = _printable(one.remedy or "")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _printable(text: str) -> str:
    """Return `text` without credentials and without what XML cannot hold."""
    clean = without_credentials(text)
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in clean)
