"""Whether a second signer's record, of the same recipe on the same GPU, agrees within both spreads."""

from __future__ import annotations

from collections.abc import Iterator

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import number
from twinrun.results.judged import Judged, gpus_of
from twinrun.results.reading import read_record
from twinrun.results.verdicts import HOLDS, Verdict

SIGNED = "signed by "


class Confirmation(Frozen):
    """What a second record says of one verdict."""

    claim: str
    confirmed: bool
    why: str


def confirmations(a: Judged, b: Judged) -> tuple[Confirmation, ...]:
    """Return for each verdict of A that holds whether B confirms it, and why or why not."""
    apart = _apart(a, b)
    theirs = {one.claim: one for one in b.verdicts}
    found = []
    for verdict in a.verdicts:
        if verdict.final in HOLDS:
            lacking = apart or next(_lacking(a, b, verdict, theirs.get(verdict.claim)), "")
            why = lacking or f"{b.run}, {b.signer}, agrees within both spreads"
            found.append(Confirmation(claim=verdict.claim, confirmed=not lacking, why=why))
    return tuple(found)


def confirmed_by(found: Judged) -> dict[str, str]:
    """Return the claims that a committed record of the same recipe confirms, each with its signer."""
    if not found.signer.startswith(SIGNED):
        return {}
    others = (read_record(file, found.project) for file in found.project.results(found.recipe))
    return {
        one.claim: other.signer.removeprefix(SIGNED)
        for other in others
        for one in confirmations(found, other)
        if one.confirmed
    }


def _apart(a: Judged, b: Judged) -> str:
    """Return why no verdict of A can be confirmed by B, empty where one can."""
    for side in (a, b):
        if not side.signer.startswith(SIGNED):
            return f"{side.run} is {side.signer}, and both must be signed by somebody who is known"
    if a.signer == b.signer:
        return f"both are {a.signer}: a second signer confirms"
    if a.plan.recipe != b.plan.recipe:
        return f"they are of {a.plan.recipe} and {b.plan.recipe}"
    if gpus_of(a) != gpus_of(b):
        return f"they are of {gpus_of(a)} and {gpus_of(b)}"
    if a.run == b.run or [one.result for one in a.points] == [one.result for one in b.points]:
        return "both are of one run"
    return ""


def _lacking(a: Judged, b: Judged, verdict: Verdict, other: Verdict | None) -> Iterator[str]:
    """Yield what keeps a verdict from being confirmed: another outcome, other points, other numbers."""
    if other is None or other.final not in HOLDS:
        yield f"there it is {other.final if other else 'not asked'}"
        return
    asked = verdict.here or verdict
    for name in verdict.judged_at:
        mine, theirs = a.point(name), b.point(name)
        if theirs is None or mine is None:
            yield f"it has no point {name}"
            return
        for one in mine.measurements:
            if one.metric not in (asked.metric, verdict.metric):
                continue
            beside = theirs.measurement(one.id)
            if beside is None or not one.overlaps(beside):
                ends = f"{number(beside.low)} to {number(beside.high)}" if beside else "nothing"
                yield f"{one.id} at {name} is {number(one.low)} to {number(one.high)} and there {ends}"
                return
