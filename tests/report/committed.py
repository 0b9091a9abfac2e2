"""The committed records, and changes of them, for tests of what is shown."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tests.records import judge
from twinrun.planning.project import Project
from twinrun.results.reading import read_record
from twinrun.results.record import Record
from twinrun.results.verdicts import AsPublished, AsRestated, RestatementVerdict, Verdict

ROOT = Path(__file__).resolve().parents[2]
PROJECT = Project(ROOT)
RECIPES = ("mpt7b-scaling", "mamba-kernels")


@cache
def committed(recipe: str) -> tuple[Record, ...]:
    """Return the committed records of a recipe, judged also where their account is of an older form."""
    loaded = PROJECT.recipe(recipe)
    found = (read_record(file, PROJECT) for file in PROJECT.results(loaded))
    return tuple(changed(one, verdicts=judge(one, loaded.published)) for one in found)


def newest(recipe: str) -> Record:
    """Return the newest committed record of a recipe in one stack, so that one of another changes no test."""
    found = [record for record in committed(recipe) if record.plan.stack == "cuda12.6-torch2.7"]
    return max(found, key=lambda record: record.created)


def changed(record: Record, **fields: Any) -> Record:
    """Return the record with other fields."""
    return record.model_copy(update=fields)


def named(record: Record) -> Record:
    """Return the record as if it were of a clean commit, and of a stack named after the PyTorch that ran."""
    clean = record.revision.model_copy(update={"commit": "c" * 40, "changes_sha256": None})
    return changed(
        record, revision=clean, plan=record.plan.model_copy(update={"stack": "cuda13.0-torch2.11"})
    )


def as_published(record: Record) -> Record:
    """Return the record as if its configuration were the published one."""
    return changed(record, plan=record.plan.model_copy(update={"differences": ()}))


def judged(record: Record, *outcomes: AsPublished) -> Record:
    """Return the record with a verdict for each of `outcomes`."""
    return changed(record, verdicts=tuple(verdict(outcome) for outcome in outcomes))


def verdict(outcome: AsPublished, **fields: Any) -> Verdict:
    """Return a verdict on a ratio of two points."""
    known: dict[str, Any] = {
        "claim": "a-claim",
        "statement": "It keeps its speed",
        "reason": "",
        "published": 0.958,
        "measured": None,
        "unit": "ratio",
        "per": "device",
    }
    return Verdict(outcome=outcome, **(known | fields))


def restated(outcome: AsRestated) -> RestatementVerdict:
    """Return a restatement that was judged."""
    return RestatementVerdict(
        statement="It trains at 46 % of the peak",
        outcome=outcome,
        reason="it is so",
        published=45.86,
        measured=None if outcome == "not-comparable" else 50.0,
        metric="model-flops-share",
        title="MFU",
        unit="%",
    )
