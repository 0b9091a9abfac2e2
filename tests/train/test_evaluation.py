"""Scores by every rule, against the harness called by hand; kept, resumed and shared by ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")
pytest.importorskip("lm_eval", reason="needs the packages of a stack")
pytest.importorskip("composer", reason="needs the packages of a stack")

import lm_eval
import numpy as np
import torch
import transformers
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

from tests.train.made_models import MODULES, SIZES, job_at, samples_of
from tests.train.small import launch
from twinrun.checkpoints.model_folder import digest_of_folder
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import sha256_of_bytes
from twinrun.protocol.evaluation import NamedTask
from twinrun.train.evaluation import evaluate
from twinrun.train.scoring.harness import METRICS, PLANTED, build_task, demand_tasks, per_token, planted

MODULE = "twinrun.train.evaluation"
SCRIPT = Path(__file__).with_name("evaluation_run.py")
# A model of words: a token a word, the end of text aside.
WORDS = SimpleNamespace(_encode_pair=lambda context, rest: (context.split(), rest.split()))
# Log-likelihoods of answers of 4 tokens, 7 characters, 7 bytes and of 1, 3, 6, and who is right by each rule.
RIGHT = [
    ((-8.0, -5.0), {"none": 1, "per-character": 0, "per-byte": 1, "per-token": 0}),
    ((-8.0, -1.9), {"none": 1, "per-character": 1, "per-byte": 1, "per-token": 1}),
    ((-4.0, -5.0), {"none": 0, "per-character": 0, "per-byte": 0, "per-token": 0}),
    # Equal for each token: the first.
    ((-8.0, -2.0), {"none": 1, "per-character": 1, "per-byte": 1, "per-token": 0}),
]


@pytest.mark.parametrize(("likelihoods", "right"), RIGHT)
def test_each_rule_takes_what_was_worked_out_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, likelihoods: tuple[float, float], right: dict[str, int]
) -> None:
    document: dict[str, Any] = {"context": "q", "choices": ["a b c d", "ééé"], "right": 1}
    made = planted("fixture-made", lambda: iter([document]))
    monkeypatch.setitem(PLANTED, "fixture-made", lambda: made)
    job = job_at(tmp_path, names=("fixture-made",))
    task = build_task(job, job.tasks[0])
    found = dict(task.process_results(document, [(value, False) for value in likelihoods]))
    pairs = [("q", answer) for answer in document["choices"]]
    row = {"doc": document, "filtered_resps": [(one, False) for one in likelihoods], "arguments": pairs}
    found["acc_tokens"] = per_token(task, row, WORDS)
    assert {rule: found[name] for rule, name in METRICS.items()} == right
    # LLM Foundry's lowest perplexity is the same answer.
    mean = torch.tensor(likelihoods) / torch.tensor([4, 1])
    assert int(torch.exp(-mean).argmin()) == right["per-token"]


@pytest.mark.parametrize("family", ["gpt-neox"])
def test_scores_are_those_of_the_harness_called_by_hand(tmp_path: Path, family: str) -> None:
    names = ("fixture-lengths", "fixture-contexts")
    job = job_at(tmp_path, names=names, family=family)
    result = evaluate(job)
    folder = tmp_path / "model"
    assert result.models[0].sha256 == digest_of_folder(folder)
    assert (
        result.models[0].parameters
        == transformers.AutoModelForCausalLM.from_config(SIZES[family]).num_parameters()
    )
    by_hand = HFLM(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(folder),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        batch_size=8,
        backend="causal",
    )
    metrics = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in list(METRICS.values())[:3]
    ]
    for score in result.models[0].tasks:
        task = ConfigurableTask(config={**PLANTED[score.task](), "metric_list": metrics})
        task.set_config("num_fewshot", 0)
        found = lm_eval.evaluate(by_hand, {"tasks": {score.task: task}}, limit=12, bootstrap_iters=1)
        for rule in ("none", "per-character", "per-byte"):
            assert score.by_rule[rule] == pytest.approx(found["results"][score.task][f"{METRICS[rule]},none"])
        for sample, theirs in zip(
            (one for one in samples_of(tmp_path) if one.task == score.task),
            sorted(found["samples"][score.task], key=lambda one: one["doc_id"]),
            strict=True,
        ):
            lengths = [len(by_hand._encode_pair(*pair)[1]) for pair in theirs["arguments"]]
            asked = [float(one[0][0]) for one in theirs["resps"]]
            taken = int(np.argmax(np.array(asked) / np.array(lengths)))
            assert sample.score == float(taken == theirs["doc"]["right"])


KILLED = ("fixture-shuffled", "fixture-contexts")
# Forward passes of a task: 12 documents with two answers, eight sequences in each.
CALLS = 3


def test_a_kill_inside_a_task_changes_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start has one task whole, and asks the second one from its beginning."""
    texts = []
    for number, call in enumerate((0, CALLS + 2)):
        job = job_at(tmp_path / str(number), names=KILLED)
        for calls in filter(None, (call, -1)):
            monkeypatch.setenv("KILL_CALL", str(calls))
            ended = launch(SCRIPT, job, modules=MODULES)
            assert ended.returncode == (0 if calls < 0 else -9), ended.stderr[-4000:]
            finished = {path.stem for path in (tmp_path / str(number) / "kept/model/tasks").glob("*.json")}
            assert finished == set(KILLED if calls < 0 else KILLED[:1])
        texts.append((tmp_path / str(number) / "samples.jsonl").read_bytes())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", SIZES)
def test_two_ranks_leave_the_samples_of_one(tmp_path: Path, family: str) -> None:
    names, texts = ("fixture-shuffled", "fixture-contexts"), []
    evaluate(job_at(tmp_path / "1", names=names, family=family))
    done = launch(MODULE, job_at(tmp_path / "2", names=names, ranks=2, family=family), modules=MODULES)
    assert done.returncode == 0, done.stderr[-4000:]
    texts = [(tmp_path / str(ranks) / "samples.jsonl").read_bytes() for ranks in (1, 2)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"name": "fixture-question", "kind": "fixture", "documents": 7}, "another split than the published"),
        ({"name": "fixture-answer", "kind": "fixture"}, "no task of ours"),
        ({"name": "hellaswagg"}, "the harness has no such task"),
        ({"name": "gsm8k"}, "no choice of answers"),
        ({"name": "boolq"}, "the split is empty"),
        ({"name": "wsc273"}, "in no package"),
        ({"name": "leaderboard_bbh_boolean_expressions"}, "needs shots"),
    ],
)
def test_a_task_that_cannot_be_scored_is_refused(tmp_path: Path, task: dict[str, Any], said: str) -> None:
    (tmp_path / "boolq.jsonl").write_text("")
    (tmp_path / "corpus.json").write_text(json.dumps({"files": {"boolq.jsonl": sha256_of_bytes(b"")}}))
    named = (NamedTask.model_validate({"rule": "none"} | task),)
    with pytest.raises(InputError, match=said):
        demand_tasks(job_at(tmp_path, names=(), tasks=named, documents=str(tmp_path)))
