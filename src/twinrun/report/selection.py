"""Which record stands for a subject on every page: the newest with most points of those that say what ran."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from twinrun.results.record import Record, hardware

# A stack's name: toolkit with its version, and PyTorch.
_STACK = re.compile(r"[a-z]+(?P<toolkit>\d[\d.]*)-torch(?P<torch>\d+\.\d+)")
# A release of PyTorch, and the toolkit that it was built for.
_TORCH = re.compile(r"(?P<torch>\d+\.\d+)\.\w+(\+[a-z]+(?P<toolkit>\d[\d.]*))?")


class SubjectRecords(NamedTuple):
    """The records of one hardware and subject."""

    hardware: str
    subject: str
    shown: Record | None
    """The record that stands for them; None where none says what ran."""
    others: tuple[Record, ...]
    """The other records, newest first."""
    lacking: str
    """Why none is shown: what the newest does not say."""


def ranked(records: Sequence[Record]) -> list[SubjectRecords]:
    """Return the records of each hardware and subject: most devices first, then most claims judged."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((hardware(record), record.description.subject), []).append(record)
    found = [(group, _subject(*names, group)) for names, group in groups.items()]
    found.sort(key=lambda one: (-_devices(one[0][0]), -_judged(one[1].shown), one[1].hardware))
    return [subject for _, subject in found]


def selected(records: Sequence[Record]) -> list[Record]:
    """Return the record that stands for each hardware and subject, where one says what ran."""
    return [one.shown for one in ranked(records) if one.shown]


def unnamed(record: Record) -> str:
    """Return why a record does not say what ran: which commit, and which PyTorch; empty where it does."""
    if record.revision.commit is None:
        return "the run has no commit"
    if record.revision.changes_sha256 is not None:
        return "the commit of the run had changes"
    torch = record.environment.libraries.get("torch")
    if torch is None or _named_after(record, torch):
        return ""
    return f"PyTorch {torch} ran under the name {record.plan.stack}"


def _named_after(record: Record, torch: str) -> bool:
    stack, ran = _STACK.fullmatch(record.plan.stack), _TORCH.fullmatch(torch)
    if stack is None or ran is None:
        # The name of the stack has no version: its lock has.
        return "torch" not in record.environment.lock_differences
    toolkits = [found["toolkit"].replace(".", "") for found in (stack, ran) if found["toolkit"]]
    return stack["torch"] == ran["torch"] and toolkits[-1].startswith(toolkits[0])


def _subject(machine: str, subject: str, group: Sequence[Record]) -> SubjectRecords:
    newest = sorted(group, key=lambda one: one.created, reverse=True)
    named = [record for record in newest if not unnamed(record)]
    # A record of an older version measured something else, and one of fewer points only a part.
    shown = max(named, key=lambda one: (one.plan.recipe_version, len(one.points)), default=None)
    others = tuple(one for one in newest if one is not shown)
    return SubjectRecords(machine, subject, shown, others, "" if shown else unnamed(newest[0]))


def _devices(record: Record) -> int:
    return max((point.devices for point in record.points), default=0)


def _judged(record: Record | None) -> int:
    verdicts = record.verdicts if record else ()
    return sum(verdict.final not in ("not-comparable", "config-mismatch") for verdict in verdicts)
