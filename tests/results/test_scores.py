"""Claims about scores: of one model by its rule, on any hardware, and of the difference of two."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from tests.records import PROJECT, finished, plan, sent_from, verdict_on
from twinrun.foundation.errors import InputError
from twinrun.manifests.claims import ScoreDifferenceClaim
from twinrun.protocol.evaluation import EvaluationResult, ModelScores, TaskScore
from twinrun.protocol.scores import compare_scores
from twinrun.results.scores import claim_called, judge_scores

RECIPE, MODEL = "mpt-chinchilla", "Cerebras-GPT-1.3B"
PUBLISHED = {
    one.measurement or "": one.value
    for one in PROJECT.recipe(RECIPE).published.claim
    if one.configuration == MODEL
}


def scored(*, apart: float = 0.0, rules: dict[str, Any] | None = None, model: str = MODEL) -> Any:
    """Return the record of the published model on one H200, its scores so far from the published ones."""
    given = (f"model=cerebras/{model}@{'0' * 40}",)
    made = plan(RECIPE, scale="node", gpu="h200", devices=1, settings=given)
    tasks = tuple(
        one.model_copy(update={"rule": (rules or {}).get(one.name, one.rule)}) for one in made.part.tasks
    )
    made = made.model_copy(update={"part": made.part.model_copy(update={"tasks": tasks})})
    found = []
    for one in tasks:
        documents, named = one.documents or 1000, {"task": one.name, "rule": one.rule, "shots": 0}
        right = round((PUBLISHED[one.name] + apart) * documents) / documents
        error = math.sqrt(right * (1 - right) / (documents - 1))
        scored: dict[str, Any] = {"score": right, "error": error, "by_rule": {one.rule: right}}
        work = {"requests": 4 * documents, "batch": 16, "seconds": 2.0, "forward_seconds": 0.5}
        counted = {"documents": documents, "prompts_sha256": "p", "version": "1"}
        found.append(TaskScore.model_validate(named | scored | work | counted))
    weights = ModelScores(sha256="w", tensors_sha256="t", parameters=1_315_723_264, tasks=tuple(found))
    result = EvaluationResult(
        point=made.points[0].id,
        device_name="NVIDIA H200",
        libraries={},
        models=(weights,),
        samples_sha256="s",
        harness="lm-eval",
        tokenizer_sha256="t",
        peak_memory_bytes=1 << 34,
    )
    return finished(made, [sent_from(made.points[0], result)])


@pytest.mark.parametrize(
    ("apart", "outcome"), [(0.0, "holds-here"), (-0.1, "fails-here"), (0.1, "fails-here")]
)
def test_a_score_of_published_weights_is_judged_on_any_hardware(apart: float, outcome: str) -> None:
    found = scored(apart=apart)
    assert [one.words for one in found.refusals] == []
    ours = [one for one in found.verdicts if one.claim.startswith("cerebras-1b") and "wsc" not in one.claim]
    assert {one.claim: one.final for one in ours} == {one.claim: outcome for one in ours}
    assert len(ours) == 6
    assert all("standard error" in (one.here or one).note for one in ours)


def test_another_rule_or_another_model_is_another_evaluation() -> None:
    found = scored(rules={"hellaswag": "per-character"})
    changed = verdict_on(found, "cerebras-1b-hellaswag")
    assert (changed.final, "evaluation.rule.hellaswag is per-character" in changed.why) == (
        "config-mismatch",
        True,
    )
    assert verdict_on(found, "cerebras-1b-boolq").final == "holds-here"
    assert verdict_on(found, "mpt-1b-boolq").final == "not-comparable"
    other = verdict_on(scored(model="Cerebras-GPT-2.7B"), "cerebras-1b-boolq")
    assert "about Cerebras-GPT-1.3B; model.repository is cerebras/Cerebras-GPT-2.7B" in other.why


def test_the_published_table_is_stated_whole() -> None:
    published = PROJECT.recipe(RECIPE).published
    scores = [one for one in published.claim if one.kind == "score"]
    assert set(Counter(one.configuration for one in scores).values()) == {7}
    table = {(one.configuration, one.measurement): one.value for one in scores}
    for claim in published.score_difference:
        over, under = ([table[name, task] for task in claim.rules] for name in (claim.over, claim.under))
        assert claim.value == pytest.approx((sum(over) - sum(under)) / len(over), abs=1e-3)
    for one in scores:
        assert one.here, one.id
        assert not {"evaluation", "evaluation.shots", *one.rules} & set(one.here.free), one.id


DIFFERENCE: dict[str, Any] = {
    "id": "mean",
    "statement": "B is above A by 0.04",
    "over": "B",
    "under": "A",
    "rules": {"arc": "per-token"},
    "direction": "above",
    "value": 0.04,
    "margin": 0.02,
    "because": "two standard errors",
    "source": {"document": "002", "where": "a table", "how": "read from a table"},
    "fails_when": {"what": "made up", "value": 0.01, "derivation": "1 / 100"},
}


def differing(
    apart: float, documents: int = 4000, share: float = 0.1
) -> dict[str, list[tuple[float, float]]]:
    """Return pairs of which a share differs, the means `apart`."""
    better, worse = round(documents * (share + apart) / 2), round(documents * (share - apart) / 2)
    kinds = ((0.0, 1.0, better), (1.0, 0.0, worse), (1.0, 1.0, documents - better - worse))
    return {"arc": [(a, b) for a, b, count in kinds for _ in range(count)]}


@pytest.mark.parametrize(
    ("direction", "apart", "documents", "outcome"),
    [
        ("above", 0.04, 4000, "holds-here"),
        ("above", 0.01, 4000, "fails-here"),
        ("above", -0.04, 4000, "fails-here"),
        ("above", 0.04, 100, "not-comparable"),
        ("within", 0.0, 4000, "holds-here"),
        ("within", 0.02, 4000, "not-comparable"),
        ("within", -0.05, 4000, "fails-here"),
    ],
)
def test_a_difference_of_means_is_judged(direction: str, apart: float, documents: int, outcome: str) -> None:
    fails = {"fails_when": {"what": "made up", "value": 0.03, "derivation": "0.03"}}
    content = DIFFERENCE | {"direction": direction} | (fails if direction == "within" else {})
    claim = ScoreDifferenceClaim.model_validate(content)
    found = compare_scores(differing(apart, documents), margin=claim.margin)
    assert judge_scores(claim, found, rules={"arc": "per-token"}).final == outcome
    other = judge_scores(claim, found, rules={"arc": "none"})
    assert (other.final, "arc none, published arc per-token" in other.reason) == ("config-mismatch", True)


def test_published_differences_hold_and_their_counterexamples_fail() -> None:
    for recipe in PROJECT.recipes().values():
        for claim in recipe.published.score_difference:
            outcomes = []
            for apart in (claim.value, claim.fails_when.value):
                found = compare_scores(differing(apart, 400_000, share=apart + 0.002), margin=claim.margin)
                outcomes.append(judge_scores(claim, found, rules=claim.rules).final)
            assert outcomes == ["holds-here", "fails-here"], claim.id
            assert claim_called(f"{recipe.recipe.name}/{claim.id}", PROJECT) == claim
    with pytest.raises(InputError, match="no claim about two models' scores"):
        claim_called("mpt7b-scaling/none", PROJECT)
