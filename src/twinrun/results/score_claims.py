"""The claims about the mean scores of two models, judged on the documents that both answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from twinrun.foundation.errors import InputError, closest
from twinrun.manifests.claims import ScoreDifferenceClaim
from twinrun.manifests.metrics import RATIO
from twinrun.planning.project import Project
from twinrun.results.equivalence import ScoreComparison
from twinrun.results.verdicts import AsRestated, RestatementVerdict, Verdict

METRIC = "score"


class Finding(NamedTuple):
    """What the scores say of a claim."""

    outcome: AsRestated
    words: str


def claim_called(name: str, project: Project) -> ScoreDifferenceClaim:
    """Return the claim that `RECIPE/CLAIM` names; raises InputError."""
    recipe, _, found = name.strip("/").rpartition("/")
    claims = {one.id: one for one in project.recipe(recipe).published.score_difference} if recipe else {}
    if found not in claims:
        raise InputError(
            "no claim about two models' scores",
            place="--claim",
            found=name,
            allowed=[f"{recipe}/{one}" for one in claims] or "RECIPE/CLAIM",
            hint=closest(found, claims),
        )
    return claims[found]


def judge_scores(claim: ScoreDifferenceClaim, found: ScoreComparison, *, rules: Mapping[str, str]) -> Verdict:
    """Judge a claim: A is the model `under`, B the model `over`.

    Args:
        found: the comparison of both, inside the margin of the claim.
        rules: by task the rule of the files.
    """
    verdict = Verdict(
        claim=claim.id,
        statement=claim.statement,
        outcome="not-comparable",
        reason="files of scores do not say what the models were trained on",
        published=claim.value,
        measured=found.mean.difference,
        unit=RATIO,
        per="run",
    )
    if claim.rules and dict(rules) != claim.rules:
        reason = f"tasks and rules are {_named(rules)}, published {_named(claim.rules)}"
        return verdict.model_copy(update={"outcome": "config-mismatch", "reason": reason})
    said = _finding(claim, found)
    mean = found.mean
    here = RestatementVerdict(
        statement=claim.statement,
        outcome=said.outcome,
        reason=(
            f"{claim.over} - {claim.under} is {mean.difference:+.4f} in the mean, interval {mean.low:+.4f}"
            f" to {mean.high:+.4f}: {said.words}; {claim.margin:g} is allowed because {claim.because}."
        ),
        published=claim.value,
        measured=mean.difference,
        metric=METRIC,
        title=METRIC,
        unit=RATIO,
    )
    return verdict.model_copy(update={"here": here})


def _finding(claim: ScoreDifferenceClaim, found: ScoreComparison) -> Finding:
    mean = found.mean
    if claim.direction == "within":
        of_outcome: dict[str, Finding] = {
            "equivalent": Finding("holds-here", "inside the margin"),
            "different": Finding("fails-here", "outside the margin"),
            "undecided": Finding("not-comparable", "it reaches over the margin, more documents would decide"),
        }
        return of_outcome[found.outcome]
    if mean.difference < claim.value - claim.margin:
        return Finding("fails-here", f"less than {claim.value:g} by more than the margin")
    if mean.low <= 0:
        return Finding("not-comparable", "it reaches below 0, more documents would decide")
    return Finding("holds-here", f"above 0, and no more than the margin below {claim.value:g}")


def _named(rules: Mapping[str, str]) -> str:
    return ", ".join(f"{task} {rule}" for task, rule in sorted(rules.items()))
