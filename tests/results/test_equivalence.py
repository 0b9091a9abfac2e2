"""Scores held against each other: by hand, by simulation, and from files of an evaluation."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.records import training_record
from twinrun.cli.records import compare
from twinrun.foundation.errors import InputError
from twinrun.protocol.scores import compare_scores, paired, read_samples
from twinrun.results.scores import demand_recorded

Pair = tuple[float, float]
# Trials of a simulation, and what chance leaves a rate of 5 % below in all but one of a million sessions.
TRIALS, MOST_ALARMS = 400, 0.05 + 5 * math.sqrt(0.05 * 0.95 / 400)


def counted(*, both: int, a: int, b: int, neither: int) -> list[Pair]:
    """Return pairs by who was right."""
    kinds: dict[Pair, int] = {(1, 1): both, (1, 0): a, (0, 1): b, (0, 0): neither}
    return [kind for kind, count in kinds.items() for _ in range(count)]


def test_an_interval_worked_by_hand() -> None:
    found = compare_scores({"task": counted(both=4, a=1, b=3, neither=2)}, margin=0.5)
    # n + 2 = 12; centre (3 - 1) / 12; variance ((3 + 1 + 1) / 12 - (2 / 12)^2) / 12; z of 5 % = 1.644854.
    error = math.sqrt((5 / 12 - (2 / 12) ** 2) / 12)
    assert error == pytest.approx(0.180021, abs=1e-6)
    (task,) = found.tasks
    for one in (task, found.mean):
        assert (one.low, one.high) == pytest.approx((-0.129441, 0.462775), abs=1e-5)
        assert (one.a, one.b, one.difference) == pytest.approx((0.5, 0.7, 0.2))
        assert (one.documents, one.a_better, one.b_better) == (10, 1, 3)
        assert one.least_margin == pytest.approx(0.462775, abs=1e-5)
    assert found.outcome == "equivalent"


def test_the_mean_weighs_tasks_alike_and_tasks_hold_together() -> None:
    small, large = counted(both=5, a=1, b=2, neither=2), counted(both=500, a=100, b=50, neither=350)
    found = compare_scores({"small": small, "large": large}, margin=0.2)
    assert found.mean.difference == pytest.approx((0.1 - 0.05) / 2)
    (a, spread), (b, other) = (
        (n / d, (m / d - (n / d) ** 2) / d) for n, m, d in ((1, 4, 12), (-50, 151, 1002))
    )
    centre, half = (a + b) / 2, 1.644854 * math.sqrt(spread + other) / 2
    assert (found.mean.low, found.mean.high) == pytest.approx((centre - half, centre + half), abs=1e-6)
    by_name = {one.task: one for one in found.tasks}
    # 5 % over two tasks: z of 2.5 %.
    assert by_name["large"].high == pytest.approx(b + 1.959964 * math.sqrt(other), abs=1e-6)


def test_a_task_on_which_they_differ_is_not_averaged_away() -> None:
    apart = counted(both=2000, a=900, b=100, neither=1000)
    found = compare_scores({"one": apart, "other": [(b, a) for a, b in apart]}, margin=0.05)
    assert found.mean.outcome == "equivalent"
    assert [one.outcome for one in found.tasks] == ["different", "different"]
    assert found.outcome == "different"


def test_few_documents_show_no_equivalence_even_where_all_agree() -> None:
    assert compare_scores({"task": counted(both=5, a=0, b=0, neither=5)}, margin=0.05).outcome == "undecided"
    many = compare_scores({"task": counted(both=5000, a=0, b=0, neither=5000)}, margin=0.05)
    assert many.outcome == "equivalent"


def rates(*, documents: int, differ: float, apart: float, margin: float, tasks: int = 1) -> dict[str, float]:
    """Return how often each outcome is reached; a share of documents differs, and B is better by `apart`."""
    draw, found = random.Random(11), dict.fromkeys(("equivalent", "different", "undecided"), 0)
    weights = ((differ - apart) / 2, (differ + apart) / 2, 1 - differ)
    kinds: tuple[Pair, ...] = ((1, 0), (0, 1), (1, 1))
    for _ in range(TRIALS):
        pairs = {f"task {number}": draw.choices(kinds, weights, k=documents) for number in range(tasks)}
        found[compare_scores(pairs, margin=margin).outcome] += 1
    return {outcome: count / TRIALS for outcome, count in found.items()}


@pytest.mark.parametrize(("documents", "tasks"), [(60, 1), (400, 1), (150, 3)])
def test_false_alarms_are_rare_at_the_margin(documents: int, tasks: int) -> None:
    found = rates(documents=documents, differ=0.15, apart=0.05, margin=0.05, tasks=tasks)
    assert found["equivalent"] <= MOST_ALARMS
    assert found["different"] <= MOST_ALARMS + 0.05 * (tasks > 1)


def sample(task: str = "arc", document: int = 0, **values: Any) -> dict[str, Any]:
    line = {"task": task, "document": document, "rule": "per-token", "score": document % 2}
    return {**line, "prompt_sha256": f"{document:064x}", **values}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Return what writes samples to a file."""

    def write(name: str, samples: list[dict[str, Any]]) -> Path:
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in samples))
        return tmp_path / name

    return write


def test_the_command_says_the_outcome_and_ends_with_it(
    written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a = written("a", [sample(document=number) for number in range(400)])
    b = written("b", [sample(document=number) for number in reversed(range(400))])
    c = written("c", [sample(document=number, score=1) for number in range(400)])
    assert compare(a, b, scores=True, margin=0.02).show(as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outcome"] == "equivalent"
    assert found["samples"] == {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in (a, b)}
    assert compare(a, c, scores=True, margin=0.02).show(as_json=False) == 1
    said = capsys.readouterr().out
    assert "Different: the interval of a difference lies outside the margin: arc, mean." in said
    assert all(part in said for part in ("B - A is +0.5000", "per-token"))
    with pytest.raises(InputError, match="equivalence is asked inside a margin"):
        compare(a, b, scores=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ([sample("boolq")], "other tasks"),
        ([sample()], "other documents of arc"),
        ([sample(), sample(document=2)], "other documents of arc"),
        ([sample(), sample(document=1, rule="none")], "another rule for arc, document 1"),
        ([sample(), sample(document=1, prompt_sha256="f" * 64)], "another prompt for arc, document 1"),
    ],
)
def test_other_samples_are_not_paired(
    written: Callable[..., Path], change: list[dict[str, Any]], said: str
) -> None:
    a, b = written("a", [sample(), sample(document=1)]), written("b", change)
    with pytest.raises(InputError, match=f"cannot be paired: {said}") as caught:
        paired(read_samples(a), read_samples(b))
    assert all(str(path) in str(caught.value) for path in (a, b))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no samples"),
        ("{", ":1: no line of JSON"),
        (json.dumps(sample()) + "\n" + json.dumps(sample()), ":2: two samples of one document"),
        (json.dumps(sample(score=1.5)), ":1:score: "),
        (json.dumps(sample(score=math.nan)), ":1:score: "),
        (json.dumps(sample(document=-1)), ":1:document: "),
        (json.dumps(sample(prompt_sha256="0")), ":1:prompt_sha256: "),
        (json.dumps(sample(kind="x")), ":1:kind: "),
        ('{"task": "a", "task": "b"}', "stands twice"),
    ],
)
def test_a_file_of_anything_else_is_refused_with_its_line(tmp_path: Path, content: str, said: str) -> None:
    (path := tmp_path / "samples.jsonl").write_text(content)
    with pytest.raises(InputError) as caught:
        read_samples(path)
    assert said in str(caught.value)


def test_samples_are_held_against_the_record_beside_them(written: Callable[..., Path]) -> None:
    path = written("samples.jsonl", [sample()])
    with pytest.raises(InputError, match="not the samples that the record is about"):
        demand_recorded(read_samples(path.parent), training_record({"nodes=1": 83.0}))
    with pytest.raises(InputError, match="cannot read samples"):
        read_samples(path.parent / "absent")
