"""The answer on two logs: one curve, differ, or cannot say; with known answers of public logs."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from twinrun.parity.answer import by_pairs, judge_logs
from twinrun.parity.logs import LoggedCurve, LossStep, curve_of
from twinrun.parity.population import population

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


def judged(values: list[float], *, first: int = 1, **options: Any) -> Any:
    return judge_logs(log(noisy(1)), log(values, first=first), **{"controls": CONTROLS} | options)


@pytest.mark.parametrize(
    ("a", "b", "options", "code", "said"),
    [
        ("llama3 cuda", "llama3 mi350x", {}, 0, "clean pairs"),
        ("llama3 cuda", "llama3 mi350x", {"bound": 1e-4}, 0, "; 0.0001 was stated"),
        ("llama3 cuda", "llama3 mi350x", {"bound": 1e-6}, 1, "; 1e-06 was stated"),
        ("llama3 cuda", "qwen3 cuda", {}, 1, "They differ from step"),
    ],
)
def test_public_losses_have_known_answers(
    a: str, b: str, options: dict[str, Any], code: int, said: str
) -> None:
    found = judge_logs(public(a), public(b), **options)
    assert (found.code, said in found.sentence) == (code, True), found.sentence


def fallen(rate: float, *, steps: int = 100, seed: int = 3) -> list[float]:
    """A loss that falls at a rate, with the noise of its batches."""
    draw = random.Random(seed)
    return [(4 * math.exp(-rate * step) + 2) * (1 + 0.02 * draw.gauss(0, 1)) for step in range(steps)]


def rounded(values: list[float], *, size: float, seed: int) -> list[float]:
    """The values with the noise of a precision, from the first step on."""
    draw = random.Random(seed)
    return [one * (1 + size * draw.gauss(0, 1)) for one in values]


@pytest.mark.parametrize(("size", "decimals"), [(5e-8, 15), (1e-4, 15), (1e-4, 4), (5e-8, 4)])
@pytest.mark.parametrize("precision", [None, "known"])
def test_clean_pairs_decide_where_no_control_run_was_made(
    size: float, decimals: int, precision: str | None
) -> None:
    """Other weights learn at another rate: that is beyond rounding; rounding itself is not."""
    known: Any = precision and ("fp32" if size < 1e-6 else "bf16")

    def written(values: list[float], seed: int) -> LoggedCurve:
        noise = rounded(values, size=size, seed=seed)
        return log([round(one, decimals) for one in noise], decimals=decimals)

    a, clean, faulty = written(fallen(0.03), 1), written(fallen(0.03), 2), written(fallen(0.02), 3)
    found = judge_logs(a, clean, precision=known)
    assert found.code == 0, found.sentence
    assert "in 0 of" not in found.sentence
    found = judge_logs(a, faulty, precision=known)
    assert (found.code, "rounding did as much in 0 of" in found.sentence) == (1, True), found.sentence


def test_no_clean_pair_that_comes_with_twinrun_is_called_a_difference() -> None:
    """Each is left out with its training, and told from the others; the bound is one in a hundred."""
    pairs, alarms = population(), 0
    for pair in pairs:
        others = [one for one in pairs if one.training != pair.training]
        held = by_pairs(pair.distances, others, precision=None, unseen=1e-6)
        alarms += any(one.value > one.limit for one in held)
    assert alarms <= 0.02 * len(pairs)


def test_logs_of_other_steps_meet_at_those_of_both_and_say_so() -> None:
    values = [one * (1 + 0.5 * (place >= 100)) for place, one in enumerate(noisy(2))]
    points = [LossStep(step, one, 15) for step, one in enumerate(values, start=1) if step % 10 == 0]
    found = judge_logs(log(noisy(1)), curve_of(points, source="other", form="test", series="loss"))
    assert (found.code, found.step) == (1, 110), found.sentence
    assert "the steps of A are 1 apart and those of B 10, taken to count the same steps" in found.compared


@pytest.mark.parametrize("controls", [0, 8])
@pytest.mark.parametrize("first", [0, 1])
def test_a_difference_late_in_a_long_log_is_seen_and_placed(controls: int, first: int) -> None:
    a, *others = (log(noisy(seed, steps=2600), first=first) for seed in range(controls + 2))
    values = [
        one * (1 + 5.0 * (place == 2500) + (place > 2500)) for place, one in enumerate(others[0].values)
    ]
    found = judge_logs(a, log(values, first=first), controls=others[1:])
    assert (found.code, found.step) == (1, 2500 + first), found.sentence
    assert f"apart {'at step' if controls else 'in the mean of steps'} {2500 + first}" in found.sentence


@pytest.mark.parametrize(
    ("more", "code", "step", "said"),
    [
        (0.0, 0, None, "one more of 8 control runs would be up to"),
        (1e-4, 1, 61, "from step 61 on"),
    ],
)
def test_control_runs_tell_rounding_from_a_difference_and_place_it(
    more: float, code: int, step: int | None, said: str
) -> None:
    found = judged([one * (1 + more * (place >= 60)) for place, one in enumerate(noisy(2))])
    assert (found.code, found.step if code else None, said in found.sentence) == (code, step, True)


@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        (noisy(2)[:2], {}, "2 steps show no curve, 5 do"),
        (noisy(2), {"copied": True}, "copies of it"),
        (noisy(2), {"first": 500}, "no step stands in all logs"),
        (noisy(2), {"controls": [log([*noisy(9)[:-1], math.inf])] * 8}, "a control run is not finite"),
        (noisy(2), {"controls": (), "precision": "fp16"}, "fewer than 60 clean pairs"),
    ],
)
def test_it_says_why_it_cannot_say(values: list[float], options: dict[str, Any], said: str) -> None:
    found = judged(values, **options)
    assert (found.code, said in found.sentence) == (3, True), found.sentence


@pytest.mark.parametrize("controls", [(), CONTROLS])
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([*noisy(2)[:-1], math.nan], "not finite there"),
        ([*noisy(2)[:40], *(4899.0 + n for n in range(110))], "step 41"),
        ([8.0 + 1e-3 * (n % 3) for n in range(150)], "the loss of A falls by"),
    ],
)
def test_a_run_that_diverges_or_learns_nothing_differs(
    values: list[float], said: str, controls: tuple[LoggedCurve, ...]
) -> None:
    found = judged(values, controls=controls)
    assert (found.code, said in found.sentence) == (1, True), found.sentence


CURVE = fallen(0.03)
CAUSES = {
    "a constant ratio of 1.443: one is in bits": [one / math.log(2) for one in CURVE],
    "a constant ratio of 0.5: a sum beside a mean": [one / 2 for one in CURVE],
    "a shift: B is one step behind A": [CURVE[0], *CURVE[:-1]],
    "other weights, data or model from the start": [one * 1.2 + 0.3 for one in fallen(0.03, seed=8)],
    "other batches from step 41 on": [*CURVE[:40], *fallen(0.03, seed=9)[40:]],
    "one step did something else": [
        one * (1 + 0.3 * math.exp(-(n - 50) / 2) * (n >= 50)) for n, one in enumerate(CURVE)
    ],
    "each update differs from the first on": [one * (1 + 0.05 * n / 100) for n, one in enumerate(CURVE)],
    "something switches at step 51": [one * (1 + 0.05 * (n >= 50)) for n, one in enumerate(CURVE)],
    "a loss that is not finite": [*CURVE[:60], *[math.nan] * 40],
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_shape_of_a_difference_speaks_for_its_cause(cause: str) -> None:
    noise = rounded(CAUSES[cause], size=5e-8, seed=5)
    found = judge_logs(log(rounded(CURVE, size=5e-8, seed=4)), log(noise))
    assert found.code == 1, found.sentence
    assert (found.cause or "").startswith(cause), found.cause


def test_false_alarms_are_rarer_than_2_in_100_whatever_the_tail() -> None:
    """Runs that drift by factors of e and more: their logarithms have the tail of an exponential."""
    draw, base, alarms = random.Random(11), noisy(0, growth=0, steps=8), 0
    for _ in range(800):
        grown = [1e-6 * math.exp(draw.expovariate(1)) for _ in range(9)]
        runs = [log([one * (1 + by * place) for place, one in enumerate(base)]) for by in grown]
        alarms += judge_logs(log(base), runs[8], controls=runs[:8]).code == 1
    assert alarms < 16
