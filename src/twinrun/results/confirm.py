"""Whether a second signer's record, of the same recipe on the same GPU, agrees within both spreads."""

from __future__ import annotations

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
    apart, found = _apart(a, b), []
    for verdict in (one for one in a.verdicts if one.final in HOLDS):
        lacking = apart or _lacking(a, b, verdict)
        why = lacking or f"{b.run}, {b.signer}, agrees within both spreads"
        found.append(Confirmation(claim=verdict.claim, confirmed=not lacking, why=why))
    return tuple(found)


def confirmed_by(found: Judged) -> dict[str, str]:
    """Return the claims that a committed record of the same recipe confirms, each with its signer."""
    signed = found.signer.startswith(SIGNED)
    files = found.project.results(found.recipe) if signed else ()
    confirmed: dict[str, str] = {}
    for other in (read_record(file, found.project) for file in files):
        signer = other.signer.removeprefix(SIGNED)
        confirmed |= {one.claim: signer for one in confirmations(found, other) if one.confirmed}
    return confirmed


def _apart(a: Judged, b: Judged) -> str:
    """Return why no verdict of A can be confirmed by B, empty where one can."""
    for side in (a, b):
        if not side.signer.startswith(SIGNED):
            return f"{side.run} is {side.signer}, and both must be signed by somebody who is known"
    if a.signer == b.signer:
        return f"both are {a.signer}: a second signer confirms"
    for mine, theirs in ((a.plan.recipe, b.plan.recipe), (gpus_of(a), gpus_of(b))):
        if mine != theirs:
            return f"they are of {mine} and {theirs}"
    same = a.run == b.run or [one.result for one in a.points] == [one.result for one in b.points]
    return "both are of one run" if same else ""


def _lacking(a: Judged, b: Judged, verdict: Verdict) -> str:
    """Return what keeps a verdict from being confirmed: another outcome, other points, other numbers."""
    other = next((one for one in b.verdicts if one.claim == verdict.claim), None)
    if other is None or other.final not in HOLDS:
        return f"there it is {other.final if other else 'not asked'}"
    metrics = {verdict.metric, (verdict.here or verdict).metric}
    for name in verdict.judged_at:
        mine, theirs = a.point(name), b.point(name)
        if theirs is None or mine is None:
            return f"it has no point {name}"
        for one in (one for one in mine.measurements if one.metric in metrics):
            beside = theirs.measurement(one.id)
            if beside is None or not one.overlaps(beside):
                ends = f"{number(beside.low)} to {number(beside.high)}" if beside else "nothing"
                return f"{one.id} at {name} is {number(one.low)} to {number(one.high)} and there {ends}"
    return ""
