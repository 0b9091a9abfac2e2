"""The claims about the mean scores of two models, judged on the documents that both answered."""

from __future__ import annotations

import math
from collections.abc import Mapping

from twinrun.foundation.errors import InputError, closest
from twinrun.manifests.claims import ScoreDifferenceClaim
from twinrun.manifests.metrics import RATIO
from twinrun.planning.project import Project
from twinrun.results.equivalence import ScoreComparison, ScoreDifference
from twinrun.results.verdicts import CONDITIONS, Condition, Verdict, outcome_of

METRIC = "score"


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
    seen = "files of scores do not say what the models were trained on"
    unpublished = Condition(name="subject", met=False, seen=seen)
    if claim.rules and dict(rules) != claim.rules:
        seen = f"tasks and rules are {_named(rules)}, published {_named(claim.rules)}"
        unpublished = Condition(name="configuration", met=False, seen=seen)
    verdict = Verdict(
        claim=claim.id,
        statement=claim.statement,
        outcome=outcome_of([unpublished], published=True),
        reason=unpublished.seen,
        published=claim.value,
        measured=found.mean.difference,
        metric=METRIC,
        title=METRIC,
        unit=RATIO,
        per="run",
        conditions=(unpublished,),
    )
    if unpublished.name == "configuration":
        return verdict
    conditions = _conditions(claim, found.mean)
    decisive = next((one for one in conditions if not one.met), conditions[-1])
    reason = (
        f"{claim.over} - {claim.under} is {found.mean.difference:+.4f} in the mean: {decisive.seen};"
        f" {claim.margin:g} is allowed because {claim.because}."
    )
    outcome = outcome_of(conditions, published=False)
    changed = {"outcome": outcome, "reason": reason, "conditions": conditions}
    return verdict.model_copy(update={"here": verdict.model_copy(update=changed)})


def _conditions(claim: ScoreDifferenceClaim, mean: ScoreDifference) -> tuple[Condition, ...]:
    """Hold the interval of the mean difference against what the claim allows."""
    within = claim.direction == "within"
    low, high = (-claim.margin, claim.margin) if within else (max(0.0, claim.value - claim.margin), math.inf)
    interval = f"its interval is {mean.low:+.4f} to {mean.high:+.4f}"
    allowed = f"from {low:+g} to {high:+g}" if within else f"above {low:g}"
    decided = (low < mean.low and mean.high < high) or mean.high < low or mean.low > high
    needed = f"{interval} and reaches over what is allowed, {allowed}; more documents would decide"
    asked = {
        "configuration": Condition(
            name="configuration", met=True, seen="tasks and rules are the published ones"
        ),
        "samples": Condition(name="samples", met=decided, seen=interval if decided else needed),
        "direction": Condition(
            name="direction",
            met=low < mean.low and mean.high < high,
            seen=f"{interval}, allowed is {allowed}",
        ),
    }
    scores = "a score belongs to weights and documents, whatever computes it"
    return tuple(asked.get(name) or Condition(name=name, met=True, seen=scores) for name in CONDITIONS)


def _named(rules: Mapping[str, str]) -> str:
    return ", ".join(f"{task} {rule}" for task, rule in sorted(rules.items()))
