"""Which record stands for a subject: of those that say what ran, the newest with most points."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.records import training_record
from tests.report.committed import changed, named, newest
from tests.report.test_page import recipe_page, run_page
from twinrun.report.summary import ranked, selected, unnamed
from twinrun.results.record import Record

RECORD = training_record({"devices=1": 400.0}, gpu="h200", scale="node", settings=("model=mpt-1b",))

TRAINING = newest("mpt7b-scaling")


def made(*, stack: str = "cuda13.0-torch2.11", torch: str | None = "2.11.0+cu130", **fields: Any) -> Record:
    """Return the record under the name of a stack, with the PyTorch that ran."""
    plan = RECORD.plan.model_copy(update={"stack": stack})
    libraries = {"torch": torch} if torch else {}
    differences = fields.pop("lock_differences", {})
    environment = RECORD.environment.model_copy(
        update={"libraries": libraries, "lock_differences": differences}
    )
    return RECORD.model_copy(update={"plan": plan, "environment": environment, **fields})


DIRTY = RECORD.revision.model_copy(update={"changes_sha256": "d" * 64})
NO_COMMIT = RECORD.revision.model_copy(update={"commit": None})


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (made(), ""),
        (made(torch="2.11.0"), ""),
        (made(stack="rocm6.3-torch2.7", torch="2.7.1+rocm6.3"), ""),
        (
            made(stack="rocm6.3-torch2.7", torch="2.7.1+rocm6.2.4"),
            "2.7.1+rocm6.2.4 ran under the name",
        ),
        (made(stack="cuda12.6-torch2.7"), "PyTorch 2.11.0+cu130 ran under the name cuda12.6-torch2.7"),
        (made(stack="cuda12.6-torch2.11"), "ran under the name cuda12.6-torch2.11"),
        (made(stack="cuda13.0-torch2.1"), "ran under the name cuda13.0-torch2.1"),
        (made(torch=None), ""),
        (made(stack="cpu"), ""),
        (made(stack="cpu", lock_differences={"torch": "2.11, lock has 2.7"}), "under the name cpu"),
        (made(revision=DIRTY), "the commit of the run had changes"),
        (made(revision=NO_COMMIT), "the run has no commit"),
    ],
)
def test_a_record_says_what_ran_or_why_it_does_not(record: Record, reason: str) -> None:
    assert reason in unnamed(record)
    assert bool(unnamed(record)) == bool(reason)


def test_the_newest_that_says_what_ran_is_shown_however_good_another_is() -> None:
    old = made(created="2026-01-01T00:00:00+00:00")
    new = made(created="2026-02-01T00:00:00+00:00")
    dirty = made(created="2026-03-01T00:00:00+00:00", revision=DIRTY)
    (one,) = ranked([dirty, old, new])
    assert one.shown is new
    assert [record.created[:7] for record in one.others] == ["2026-03", "2026-01"]
    assert selected([dirty]) == []
    assert ranked([dirty])[0].lacking == "the commit of the run had changes"


def test_an_older_version_of_the_recipe_gives_way() -> None:
    plan = made().plan.model_copy(update={"recipe_version": RECORD.plan.recipe_version + 1})
    later = made().model_copy(update={"plan": plan, "created": "2020-01-01T00:00:00+00:00"})
    assert selected([made(), later]) == [later]


def test_what_was_sent_in_is_a_subject_of_its_own() -> None:
    mine, sent = made(), made(evidence="as sent in", created="2027-01-01T00:00:00+00:00")
    assert selected([mine, sent]) == [mine, sent]


def test_a_subject_whose_records_do_not_say_what_ran_says_so(tmp_path: Path) -> None:
    plan = TRAINING.plan.model_copy(update={"stack": "cuda12.6-torch2.7"})
    record = changed(named(TRAINING), plan=plan)
    text = " ".join(recipe_page(tmp_path, TRAINING.plan.recipe, record).words().split())
    assert "No record says what ran, so none is shown." in text
    assert "no record is shown, because PyTorch 2.11.0+cu130 ran under the name cuda12.6-torch2.7." in text


def test_a_record_that_was_sent_in_is_marked_on_every_line_with_a_figure(tmp_path: Path) -> None:
    record = changed(named(TRAINING), evidence="as sent in")
    for page in (
        recipe_page(tmp_path, TRAINING.plan.recipe, record),
        run_page(tmp_path, record),
    ):
        # The probe of the machine names what it found.
        text = page.words().replace("Devices 4 x NVIDIA H200 SXM", "")
        assert text.count("4 x NVIDIA H200 SXM") > 2
        assert not re.findall(r"4 x NVIDIA H200 SXM(?!,? as sent in)", text)
        assert "measured numbers, commit, driver, versions of libraries and hosts are on trust." in text


def test_a_newer_record_of_fewer_points_does_not_stand_for_the_whole() -> None:
    points = tuple(RECORD.points[0].model_copy(update={"id": name}) for name in ("devices=1", "devices=2"))
    whole = made(run="20261126-000000-aaaaaaaa-0001", created="2026-11-26T00:00:00+00:00", points=points)
    part = made(run="20261127-000000-aaaaaaaa-0002", created="2026-11-27T00:00:00+00:00")
    [found] = ranked([part, whole])
    assert found.shown is whole
    assert found.others == (part,)
