"""Claims about scores: of one model by its rule, and of the difference of two."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.counterexamples import evaluated

from tests.records import PROJECT, judge, plan, training_record
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import validate
from twinrun.manifests.claims import Claim, ScoreDifferenceClaim
from twinrun.manifests.numbers import check_numbers
from twinrun.manifests.published import PublishedClaims
from twinrun.protocol.measurements import sampled
from twinrun.results.compare import compare
from twinrun.results.equivalence import Pair, compare_scores
from twinrun.results.finished_run import read_run
from twinrun.results.judge import claims_digest
from twinrun.results.record import Record, write_record
from twinrun.results.score_claims import claim_called, judge_scores
from twinrun.results.submission import write_submission
from twinrun.results.verdicts import Verdict
from twinrun.workloads import load_workload
from twinrun.workloads.evaluation.numbers import kept_fall
from twinrun.workloads.workload import Workload

# Any share of documents: higher is better, at most one.
GIVEN = (f"model=cerebras/Cerebras-GPT-1.3B@{'0' * 40}",)
METRIC = "checks-passed"
MODEL = {"parameters": 6658859008, "sequence": 2048, "data.repository": "allenai/c4"}
HERE: dict[str, Any] = {
    "statement": "the model gets 60 % in another harness",
    "metric": METRIC,
    "measurement": "arc",
    "better": "equal",
    "value": 0.6,
    "derivation": "0.6 / 1",
    "basis": "a table",
    "tolerance": 0.05,
    "because": "two standard errors",
    "free": ["sequence"],
    "fails_when": {"what": "made up", "value": 0.7, "derivation": "7 / 10"},
}
CLAIM: dict[str, Any] = {
    "id": "arc",
    "statement": "the model gets 60 %",
    "kind": "score",
    "metric": METRIC,
    "unit": "ratio",
    "per": "run",
    "measurement": "arc",
    "configuration": "model",
    "rules": {"arc": "per-token"},
    "value": 0.6,
    "better": "equal",
    "tolerance": 0.05,
    "because": "two standard errors",
    "source": {"document": "002", "where": "a table", "how": "read from a table"},
    "here": HERE,
}


def published(claim: dict[str, Any], **configuration: Any) -> PublishedClaims:
    content = {"fingerprint": {}, "configurations": {"model": MODEL | configuration}, "claim": [claim]}
    found = validate(content, PublishedClaims, place="published.toml")
    check_numbers(found, place="published.toml", metrics=PROJECT.metrics, gpus=PROJECT.gpus)
    return found


def scored(value: float) -> Record:
    """Return a record of MPT-7B that got `value`, on other hardware than any publication's."""
    made = training_record({"nodes=1": 400.0}, recipe="mpt7b-scaling", gpu="h200")
    scores = (
        sampled("arc", [value], metric=METRIC, unit="ratio", per="run"),
        sampled("arc/error", [0.012], metric=METRIC, unit="ratio", per="run"),
    )
    points = tuple(
        one.model_copy(update={"measurements": (*one.measurements, *scores)}) for one in made.points
    )
    planned = made.plan.model_copy(update={"points": made.plan.points[:1]})
    return made.model_copy(update={"points": points, "plan": planned})


def judged(record: Record, claims: PublishedClaims, monkeypatch: pytest.MonkeyPatch, rule: str) -> Verdict:
    """Judge a record whose fingerprint has the rule of its task, as one of an evaluation has."""

    def with_rule(name: str) -> Workload:
        found = load_workload(name)
        own = found.settings
        ruled = replace(own, of=lambda *of: {**own.of(*of), "evaluation.rule.arc": rule})
        return replace(found, settings=ruled)

    monkeypatch.setattr("twinrun.planning.configuration.load_workload", with_rule)
    (verdict,) = judge(record, claims, PROJECT)
    return verdict


@pytest.mark.parametrize(
    ("better", "value", "outcome"),
    [
        ("equal", 0.60, "reproduced"),
        ("equal", 0.575, "reproduced"),
        ("equal", 0.56, "not-reproduced"),
        # Published weights that score better were asked something else; weights of one's own are better.
        ("equal", 0.64, "not-reproduced"),
        ("higher", 0.64, "reproduced"),
        ("higher", 0.56, "not-reproduced"),
    ],
)
def test_a_score_is_judged_on_any_hardware(
    monkeypatch: pytest.MonkeyPatch, better: str, value: float, outcome: str
) -> None:
    claims = published(CLAIM | {"better": better})
    verdict = judged(scored(value), claims, monkeypatch, "per-token")
    assert (verdict.outcome, verdict.here) == (outcome, None), verdict.reason
    assert verdict.measured == value
    assert verdict.note == "standard error 0.012"
    assert "5% " in verdict.reason


def test_another_rule_is_a_mismatch_that_nothing_restates(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = judged(scored(0.6), published(CLAIM), monkeypatch, "none")
    assert verdict.final == "config-mismatch"
    assert "evaluation.rule.arc is none, published per-token" in verdict.reason
    assert verdict.here
    assert "evaluation.rule.arc is none, published per-token" in verdict.here.reason


def test_another_model_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = judged(scored(0.6), published(CLAIM, parameters=1), monkeypatch, "per-token")
    assert verdict.final == "not-comparable"
    assert verdict.reason.startswith("about model; parameters is 6658859008")


@pytest.mark.parametrize(
    ("value", "outcome"), [(0.6, "holds-here"), (0.56, "fails-here"), (0.64, "fails-here")]
)
def test_in_another_harness_it_is_judged_as_restated(
    monkeypatch: pytest.MonkeyPatch, value: float, outcome: str
) -> None:
    claims = published(CLAIM, sequence=4096)
    verdict = judged(scored(value), claims, monkeypatch, "per-token")
    assert (verdict.outcome, verdict.final) == ("config-mismatch", outcome), verdict.why
    assert verdict.here
    assert "sequence 2,048, published 4,096" in verdict.departures
    assert verdict.here.note == "standard error 0.012"
    assert "5.0% apart is allowed" in verdict.here.reason


def test_a_smoke_run_never_reproduces_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    smoke = scored(0.6)
    smoke = smoke.model_copy(update={"plan": smoke.plan.model_copy(update={"scale": "smoke"})})
    verdict = judged(smoke, published(CLAIM), monkeypatch, "per-token")
    assert verdict.final == "holds-here"
    assert "smoke scale" in verdict.departures


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rules": {}}, "`rules` belong to scores"),
        ({"configuration": "other"}, "no `configurations.other`"),
        ({"measurement": None}, "also needs: measurement"),
        ({"kind": "absolute"}, "also needs: point, hardware"),
        (
            {"here": HERE | {"fails_when": HERE["fails_when"] | {"value": 0.61, "derivation": "0.61"}}},
            "passes",
        ),
        ({"here": HERE | {"value": 0.5}}, "weaker than the published statement"),
        ({"here": HERE | {"free": ["evaluation.shots"]}}, "not a field of the fingerprint"),
    ],
)
def test_a_score_without_what_belongs_to_it_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        published(CLAIM | change)


def test_digests_of_claims_without_scores_are_what_they_were() -> None:
    found = PROJECT.recipe("mpt7b-scaling").published
    assert all(not claim.rules and claim.configuration is None for claim in found.claim)
    changed = found.model_copy(update={"configurations": {"model": {"parameters": 1}}})
    assert claims_digest(changed) != claims_digest(found)


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
    "source": CLAIM["source"],
    "fails_when": {"what": "made up", "value": 0.01, "derivation": "1 / 100"},
}


def differing(apart: float, documents: int = 4000, share: float = 0.1) -> dict[str, list[Pair]]:
    """Return pairs of which a share differs, the means `apart`."""
    better, worse = round(documents * (share + apart) / 2), round(documents * (share - apart) / 2)
    kinds: dict[Pair, int] = {(0, 1): better, (1, 0): worse, (1, 1): documents - better - worse}
    return {"arc": [kind for kind, count in kinds.items() for _ in range(count)]}


@pytest.mark.parametrize(
    ("direction", "apart", "documents", "outcome"),
    [
        ("above", 0.04, 4000, "holds-here"),
        ("above", 0.06, 4000, "holds-here"),
        ("above", 0.01, 4000, "fails-here"),
        ("above", -0.04, 4000, "fails-here"),
        ("above", 0.04, 100, "not-comparable"),
        ("within", 0.0, 4000, "holds-here"),
        ("within", 0.02, 4000, "not-comparable"),
        ("within", 0.05, 4000, "fails-here"),
        ("within", -0.05, 4000, "fails-here"),
    ],
)
def test_a_difference_of_means_is_judged(direction: str, apart: float, documents: int, outcome: str) -> None:
    fails = {"what": "made up", "value": 0.03, "derivation": "0.03"} if direction == "within" else {}
    content = DIFFERENCE | {"direction": direction} | ({"fails_when": fails} if fails else {})
    claim = validate(content, ScoreDifferenceClaim, place="claim")
    found = compare_scores(differing(apart, documents), margin=claim.margin)
    verdict = judge_scores(claim, found, rules={"arc": "per-token"})
    assert verdict.final == outcome, verdict.why
    other = judge_scores(claim, found, rules={"arc": "none"})
    assert other.final == "config-mismatch"
    assert "arc none, published arc per-token" in other.reason


def chinchilla(**rules: str) -> dict[str, Verdict]:
    """Return the verdicts on an MPT-1B that got what was published, its tasks by these rules."""
    loaded = PROJECT.recipe("mpt-chinchilla").published
    ours = {one.measurement or "": one.value for one in loaded.claim if one.configuration == "MPT-1B"}
    made = plan("mpt-chinchilla", gpu="h200")
    tasks = tuple(one.model_copy(update={"rule": rules.get(one.name, one.rule)}) for one in made.part.tasks)
    made = made.model_copy(update={"part": made.part.model_copy(update={"tasks": tasks})})
    return {one.claim: one for one in judge(evaluated(made, ours), loaded, PROJECT)}


def test_a_run_of_one_model_is_judged_by_its_scores_and_by_their_rules() -> None:
    as_published = chinchilla()
    for name, verdict in as_published.items():
        ours = name.startswith("mpt-1b") or name == "stable-to-the-end"
        assert verdict.final == ("holds-here" if ours else "not-comparable"), f"{name}: {verdict.why}"
    assert as_published["mpt-3b-boolq"].reason.startswith("about MPT-3B; parameters is 1315950592")
    assert as_published["cerebras-1b-boolq"].reason.startswith("about Cerebras-GPT-1.3B; model.repository")
    other = chinchilla(hellaswag="per-character")
    changed = {name for name, verdict in other.items() if verdict.final != as_published[name].final}
    assert changed == {"mpt-1b-hellaswag"}
    assert other["mpt-1b-hellaswag"].final == "config-mismatch"
    assert (
        "evaluation.rule.hellaswag is per-character, published per-token" in other["mpt-1b-hellaswag"].reason
    )


def test_the_published_table_is_stated_whole() -> None:
    loaded = PROJECT.recipe("mpt-chinchilla").published
    scores = [one for one in loaded.claim if one.kind == "score"]
    by_model = Counter(one.configuration for one in scores)
    assert set(by_model.values()) == {7}
    assert len(by_model) == 4
    table = {(one.configuration, one.measurement): one.value for one in scores}
    for claim in loaded.score_difference:
        over, under = ([table[name, task] for task in claim.rules] for name in (claim.over, claim.under))
        assert claim.value == pytest.approx((sum(over) - sum(under)) / len(over), abs=1e-3)


@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        ([10.0, *[3.0] * 20], 1.0),
        # The means of two steps each: from 10 down to 2, and up to 4 again, a quarter of the fall.
        ([10.0, *[2.0] * 17, 4.0, 4.0], 0.75),
        ([10.0, 6.0, 10.0, 12.0], 0.0),
        ([10.0, 11.0], None),
        ([10.0, math.nan, 3.0], None),
    ],
)
def test_what_a_curve_has_kept_of_its_fall(losses: list[float], kept: float | None) -> None:
    assert kept_fall(losses) == kept


def stated() -> dict[str, ScoreDifferenceClaim]:
    recipes = PROJECT.recipes().values()
    return {
        f"{one.recipe.name}/{claim.id}": claim for one in recipes for claim in one.published.score_difference
    }


def test_published_differences_hold_and_their_counterexamples_fail() -> None:
    for name, claim in stated().items():
        outcomes = []
        for apart in (claim.value, claim.fails_when.value):
            found = compare_scores(differing(apart, 400_000, share=apart + 0.002), margin=claim.margin)
            outcomes.append(judge_scores(claim, found, rules=claim.rules).final)
        assert outcomes == ["holds-here", "fails-here"], name
        assert claim_called(name, PROJECT) == claim


def test_no_restatement_frees_the_rule_or_the_shots() -> None:
    for one in PROJECT.recipes().values():
        scores: list[Claim] = [claim for claim in one.published.claim if claim.kind == "score"]
        for claim in scores:
            assert claim.here, claim.id
            assert not {"evaluation", "evaluation.shots", *claim.rules} & set(claim.here.free), claim.id
            assert f"evaluation.rule.{claim.measurement}" in one.published.fingerprint_of(claim)


@pytest.mark.parametrize("name", ["mpt7b-scaling/none", "none", "recipes/mpt7b-scaling/none"])
def test_a_claim_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(InputError, match="no claim about two models' scores"):
        claim_called(name, PROJECT)


def test_scores_of_a_folder_are_not_sent_in(tmp_path: Path) -> None:
    made = plan("mpt-chinchilla", scale="node", settings=("model=/scratch/somebody/small",))
    write_record(tmp_path / "record.json", evaluated(made, {"piqa": 0.5}))
    with pytest.raises(InputError, match="the model lies on one machine") as caught:
        write_submission(tmp_path / "submission.json", read_run(tmp_path / "record.json", PROJECT))
    assert caught.value.found == "small"


def test_a_score_of_nothing_has_a_difference_and_no_multiple() -> None:
    made = plan("mpt-chinchilla", scale="node", settings=GIVEN)
    a, b = (evaluated(made, {"piqa": score, "boolq": 0.5}) for score in (0.0, 0.25))
    pairs = {one.measurement: one for one in compare(a, b, PROJECT).pairs}
    assert (pairs["piqa"].gain, pairs["piqa"].difference) == (None, 0.25)
    assert pairs["boolq"].gain is not None
    assert pairs["boolq"].gain.times == 1


def test_a_model_that_is_there_answers_its_own_claims_alone() -> None:
    made = plan("mpt-chinchilla", scale="node", settings=GIVEN)
    record = evaluated(made, {"piqa": 0.67})
    verdicts = {one.claim: one for one in judge(record, PROJECT.recipe("mpt-chinchilla").published, PROJECT)}
    assert verdicts["cerebras-1b-piqa"].final == "holds-here"
    said = {
        "cerebras-1b-boolq": "this run has no score of boolq",
        "cerebras-3b-piqa": "about Cerebras-GPT-2.7B; model.repository is cerebras/Cerebras-GPT-1.3B",
        "mpt-1b-piqa": "about MPT-1B; parameters is not recorded",
        "stable-to-the-end": "nothing was trained: cerebras/Cerebras-GPT-1.3B@000000000000 was there",
    }
    for claim, words in said.items():
        assert verdicts[claim].final == "not-comparable"
        assert words in verdicts[claim].why or words in verdicts[claim].reason
