"""A record that is sent in says nothing of hosts and folders, and is taken once, whole and unforged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.records import ROOT, again, sealed, training_record
from twinrun.foundation.errors import InputError
from twinrun.planning.project import Project
from twinrun.results.judged import Judged
from twinrun.results.record import SENT_IN
from twinrun.results.submission import add_submission, write_submission

RECIPE, HOST = "recipes/mpt7b-scaling", "gpu-17.cluster.example.org"


def ran() -> Judged:
    """Return the record of a run on a named host."""
    found = training_record({"nodes=1": 83.0})
    allocation = found.record.allocation.model_dump(mode="json")
    content = json.dumps(allocation).replace("node-0", HOST)
    points = tuple(one.model_copy(update={"hosts": (HOST,)}) for one in found.record.points)
    return again(found, allocation=type(found.record.allocation).model_validate_json(content), points=points)


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """The submission of that run."""
    found = ran()
    environment = found.environment.model_copy(update={"variables": {"HF_HOME": f"/{'home'}/somebody/data"}})
    found = again(found, environment=environment)
    (tmp_path / "record.json").write_text(found.record.model_dump_json())
    write_submission(tmp_path / "submission.json", found, tmp_path / "record.json")
    return tmp_path / "submission.json"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project without records."""
    copied = tmp_path / "project"
    shutil.copytree(ROOT / "recipes", copied / "recipes", ignore=shutil.ignore_patterns("results"))
    (copied / "images").symlink_to(ROOT / "images")
    return Project(copied)


def test_a_submission_names_no_host_and_no_folder(sent: Path) -> None:
    text = sent.read_text()
    assert HOST not in text
    assert "somebody" not in text
    assert json.loads(text)["evidence"] == SENT_IN


def test_a_submission_is_added_once_with_the_same_verdicts(sent: Path, project: Project) -> None:
    path, found = add_submission(sent, RECIPE, project)
    assert path.parent == project.root / RECIPE / "results"
    kinds = [[(one.claim, one.final) for one in each.verdicts] for each in (found, ran())]
    assert kinds[0] == kinds[1] != []
    with pytest.raises(InputError, match="the results have this run"):
        add_submission(sent, RECIPE, project)


def steps(record: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = record["points"][0]["result"]["steps"]
    return found


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "faster": (lambda one: [step.update(seconds=step["seconds"] / 9) for step in steps(one)], "not whole"),
    "lacking": (lambda one: steps(one).pop(), "not whole"),
    "dirty": (lambda one: one["revision"].update(changes_sha256="0" * 64), "not the run of a clean commit"),
    "not sent": (lambda one: one.update(evidence="measured"), "a record that was not sent in"),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_is_forged_is_refused(name: str, sent: Path, project: Project) -> None:
    change, said = FORGED[name]
    content = json.loads(sent.read_text())
    change(content)
    sent.write_text(json.dumps(sealed(content)))
    with pytest.raises(InputError, match=said):
        add_submission(sent, RECIPE, project)
    assert not list((project.root / RECIPE).glob("results/*"))


def test_another_file_is_refused(sent: Path, project: Project) -> None:
    for text in ("", "{", "[]", sent.read_text()[:-9]):
        sent.write_text(text)
        with pytest.raises(InputError):
            add_submission(sent, RECIPE, project)
