"""The answer on two logs: one curve, differ, or cannot say; with known answers of public logs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from tests.records import PROJECT
from twinrun.parity.answer import CurveAnswer, judge_logs
from twinrun.parity.logs import LoggedCurve, LossStep, curve_of

METRIC = PROJECT.metrics["loss"]
# The first losses of files in tests/assets/losses of pytorch/torchtitan: facts of runs, at the commits named.
TORCHTITAN = {
    # llama3_cuda.txt at 13a712e9
    "llama3 cuda": "8.048324584960938 7.751155376434326 7.032480716705322 6.154099464416504 5.193394184112549"
    " 4.581042766571045 4.17402982711792 3.9485154151916504 3.891420364379883 3.656148672103882",
    # llama3_rocm_mi350x.txt at 06562f39
    "llama3 mi350x": "8.048333168029785 7.751149654388428 7.032470226287842 6.154115200042725"
    " 5.193387985229492 4.5810627937316895"
    " 4.174030303955078 3.9485042095184326 3.8914008140563965 3.6561331748962402",
    # qwen3_moe_cuda.txt at 106758ca
    "qwen3 cuda": "7.60442590713501 6.861630439758301 6.477890491485596 6.351352691650391 6.220487117767334"
    " 6.121650695800781 6.0008697509765625 5.877288818359375 5.824869155883789 5.664002418518066",
}


def log(values: list[float], *, name: str = "log", first: int = 1, decimals: int = 15) -> LoggedCurve:
    points = [LossStep(step, value, decimals) for step, value in enumerate(values, start=first)]
    return curve_of(points, source=name, form="test", series="loss")


def public(name: str) -> LoggedCurve:
    return log([float(one) for one in TORCHTITAN[name].split()], name=name)


def noisy(seed: int, *, growth: float = 1e-7, steps: int = 150) -> list[float]:
    draw = random.Random(seed)
    return [
        (6 * math.exp(-step / 40) + 2) * (1 + growth * (1 + step / 10) * draw.gauss(0, 1))
        for step in range(steps)
    ]


CONTROLS = [log(noisy(100 + number)) for number in range(8)]


def judged(values: list[float], **options: object) -> CurveAnswer:
    given = {"controls": CONTROLS} | options
    return judge_logs(log(noisy(1)), log(values, name="other"), metric=METRIC, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("a", "b", "bound", "code", "said"),
    [
        ("llama3 cuda", "llama3 mi350x", None, 3, "8 control runs of A decide"),
        ("llama3 cuda", "llama3 mi350x", 1e-4, 0, "within 0.0001 as stated"),
        ("llama3 cuda", "llama3 mi350x", 1e-6, 1, "They differ at step 1"),
        ("llama3 cuda", "qwen3 cuda", None, 1, "They differ at step 1"),
    ],
)
def test_public_losses_have_known_answers(a: str, b: str, bound: float | None, code: int, said: str) -> None:
    found = judge_logs(public(a), public(b), bound=bound, metric=METRIC)
    assert (found.code, said in found.sentence) == (code, True), found.sentence


def test_logs_that_begin_late_may_be_as_far_apart_at_first_as_their_controls() -> None:
    """Rounding has grown by then beyond what a first step shows, and configuration is in no log."""
    late = [log(noisy(number, growth=2e-4)[50:], name=f"{number}", first=51) for number in range(1, 20)]
    found = judge_logs(late[0], late[1], controls=late[2:], metric=METRIC)
    assert (found.code, "a control run is" in found.sentence) == (3, True), found.sentence


def test_logs_of_other_steps_are_said() -> None:
    sparse = [LossStep(10 * step, value, 15) for step, value in enumerate(noisy(2), start=1)]
    other = curve_of(sparse, source="other", form="test", series="loss")
    found = judge_logs(log(noisy(1)), other, controls=CONTROLS, metric=METRIC)
    assert "the steps of A are 1 apart and those of B 10, taken to count the same steps" in found.compared


def test_rounding_is_one_curve() -> None:
    found = judged(noisy(2))
    assert (found.code, found.sentence[:9]) == (0, "One curve")
    assert found.errors is not None
    assert found.errors < 4.8


def test_a_difference_has_its_first_step_and_its_size() -> None:
    values = [one * (1 + 1e-4 * (place >= 60)) for place, one in enumerate(noisy(2))]
    found = judged(values)
    assert (found.code, found.step) == (1, 61)
    assert "from step 61 on" in found.sentence
    assert found.errors is not None
    assert found.errors > 5


def test_steps_are_those_of_the_log() -> None:
    every_tenth = [log(noisy(seed)[::10], first=0) for seed in (1, 2, *range(100, 108))]
    moved = [one.model_copy(update={"steps": tuple(10 * step for step in one.steps)}) for one in every_tenth]
    far = moved[1].model_copy(
        update={"values": tuple(v * (1 + 1e-3 * (n >= 5)) for n, v in enumerate(moved[1].values))}
    )
    assert judge_logs(moved[0], far, controls=moved[2:], metric=METRIC).step == 50


@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        (noisy(2), {"controls": CONTROLS[:7]}, "an envelope needs 8 control runs"),
        (noisy(2), {"controls": [CONTROLS[0]] * 9}, "an envelope needs 8 control runs"),
        (noisy(2)[:2], {}, "show no curve; 4 after them are needed"),
        (noisy(2), {"copied": True}, "copies of it"),
        ([*noisy(2)[:-1], math.nan], {"controls": ()}, "not finite at step 150"),
        (noisy(2), {"controls": [log([*noisy(9)[:-1], math.inf])] * 8}, "a control run is not finite"),
        (noisy(2), {"controls": [log(noisy(n, growth=1e-3)) for n in range(8)]}, "state a wider --bound"),
    ],
)
def test_it_says_why_it_cannot_say(values: list[float], options: dict[str, object], said: str) -> None:
    found = judged(values, **options)
    assert (found.code, said in found.sentence) == (3, True), found.sentence


def test_curves_of_no_training_say_nothing() -> None:
    flat = [log([2.0 + 1e-8 * ((7 * n + k) % 5) for n in range(20)], name=str(k)) for k in range(10)]
    found = judge_logs(flat[0], flat[1], controls=flat[2:], metric=METRIC)
    assert (found.code, "nothing was learned" in found.sentence) == (3, True)


def test_steps_that_do_not_meet_say_nothing() -> None:
    found = judge_logs(log(noisy(1)), log(noisy(2), first=500), metric=METRIC)
    assert (found.code, "no step stands in all logs" in found.sentence) == (3, True)


def test_a_loss_that_ends_beside_control_runs_differs() -> None:
    found = judged([*noisy(2)[:-1], math.nan])
    assert (found.code, found.step) == (1, 150)


def test_what_a_log_rounds_away_is_no_difference() -> None:
    def rounded(seed: int) -> LoggedCurve:
        return log([round(one, 4) for one in noisy(seed, growth=2e-5)], name=str(seed), decimals=4)

    controls = [rounded(100 + number) for number in range(8)]
    found = judge_logs(rounded(1), rounded(2), controls=controls, metric=METRIC)
    assert found.code == 0, found.sentence


@pytest.mark.parametrize("tail", ["normal", "student", "exponential"])
def test_false_alarms_are_rarer_than_2_in_100_whatever_the_tail(tail: str) -> None:
    """Runs that drift by factors of e and more, whose logarithms have the tail of another distribution."""
    draw = random.Random(11)
    drawn: Callable[[], float] = {
        "normal": lambda: draw.gauss(0, 1.2),
        "student": lambda: (
            0.7 * draw.gauss(0, 1) / math.sqrt(sum(draw.gauss(0, 1) ** 2 for _ in range(5)) / 5)
        ),
        "exponential": lambda: draw.expovariate(1),
    }[tail]
    base = noisy(0, growth=0, steps=8)
    alarms, trials = 0, 800
    for _ in range(trials):
        runs = []
        for _run in range(9):
            grown = 1e-6 * math.exp(drawn())
            runs.append(log([one * (1 + grown * place) for place, one in enumerate(base)]))
        metric = METRIC.model_copy(
            update={"evidence": METRIC.evidence.model_copy(update={"bounds": {"bf16": 0.5}})}
        )
        alarms += judge_logs(log(base), runs[8], controls=runs[:8], metric=metric).code == 1
    assert alarms < 0.02 * trials
