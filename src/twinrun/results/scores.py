"""Claims about the scores of two models on the same documents, judged by the files that evaluations leave."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from twinrun.foundation.errors import InputError, closest
from twinrun.manifests.claims import ScoreDifferenceClaim
from twinrun.manifests.metrics import RATIO
from twinrun.planning.project import Project
from twinrun.protocol.evaluation import EvaluationResult
from twinrun.protocol.scores import SampleFile, ScoreComparison
from twinrun.results.judged import Judged
from twinrun.results.verdicts import CONDITIONS, Condition, Verdict, outcome_of

METRIC = "score"


def demand_recorded(found: SampleFile, record: Judged) -> None:
    """Refuse samples that are not those of which a record has the digest; raises InputError."""
    results = [point.result for point in record.points]
    digests = [one.samples_sha256 for one in results if isinstance(one, EvaluationResult)]
    if found.sha256 not in digests:
        message, allowed = "not the samples that the record is about", digests or "a record of an evaluation"
        raise InputError(message, place=found.place, found=f"sha256 {found.sha256}", allowed=allowed)


def claim_called(name: str, project: Project) -> ScoreDifferenceClaim:
    """Return the claim about two models' scores that `RECIPE/CLAIM` names; raises InputError."""
    recipe, _, found = name.strip("/").rpartition("/")
    claims = {one.id: one for one in project.recipe(recipe).published.score_difference} if recipe else {}
    if found not in claims:
        message, allowed = "no claim about two models' scores", [f"{recipe}/{one}" for one in claims]
        told: dict[str, Any] = {"allowed": allowed or "RECIPE/CLAIM", "hint": closest(found, claims)}
        raise InputError(message, place="--claim", found=name, **told)
    return claims[found]


def judge_scores(claim: ScoreDifferenceClaim, found: ScoreComparison, *, rules: Mapping[str, str]) -> Verdict:
    """Judge a claim about the mean scores of two models: A is the model `under`, B the model `over`.

    Args:
        found: the comparison of both, inside the margin of the claim.
        rules: by task the rule of the files.
    """
    name, seen = "subject", "files of scores do not say what the models were trained on"
    if other := claim.rules and dict(rules) != claim.rules:
        used, stated = (", ".join(map(" ".join, sorted(of.items()))) for of in (rules, claim.rules))
        name, seen = "configuration", f"tasks and rules are {used}, published {stated}"
    as_published = Condition(name=name, met=False, seen=seen)
    verdict = Verdict(
        claim=claim.id,
        statement=claim.statement,
        outcome=outcome_of([as_published], published=True),
        reason=as_published.seen,
        published=claim.value,
        measured=found.mean.difference,
        metric=METRIC,
        title=METRIC,
        unit=RATIO,
        per="run",
        conditions=(as_published,),
    )
    if other:
        return verdict
    mean, within = found.mean, claim.direction == "within"
    low, high = (-claim.margin, claim.margin) if within else (max(0.0, claim.value - claim.margin), math.inf)
    holds = low < mean.low and mean.high < high
    decided = holds or mean.high < low or mean.low > high
    interval = f"its interval is {mean.low:+.4f} to {mean.high:+.4f}"
    allowed = f"allowed is from {low:+g} to {high:+g}" if within else f"allowed is above {low:g}"
    whatever = True, "a score belongs to weights and documents, whatever computes it"
    asked = dict.fromkeys(CONDITIONS, whatever)
    asked["samples"] = decided, interval if decided else f"{interval}, {allowed}; more documents would decide"
    asked["direction"] = holds, f"{interval}, {allowed}"
    conditions = [Condition(name=name, met=met, seen=seen) for name, (met, seen) in asked.items()]
    decisive = next((one for one in conditions if not one.met), conditions[-1])
    reason = (
        f"{claim.over} - {claim.under} is {mean.difference:+.4f} in the mean: {decisive.seen};"
        f" {claim.margin:g} is allowed because {claim.because}."
    )
    outcome = outcome_of(conditions, published=False)
    changed = {"outcome": outcome, "reason": reason, "conditions": tuple(conditions)}
    return verdict.model_copy(update={"here": verdict.model_copy(update=changed)})
