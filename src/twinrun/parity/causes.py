"""What the shape of a difference speaks for: its likely causes, and what to look at next."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from twinrun.parity.population import signed_distances

# Two losses of fp32 are no closer than this.
_FINEST = 1.2e-7
UNKNOWN = "the shape of the difference does not tell its cause: `--trace` names the first layer that differs"


def cause_of(steps: Sequence[int], a: Sequence[float], b: Sequence[float], *, onset: int) -> str:
    """Return the likely cause of a difference that begins at step `onset`, in words."""
    if not all(map(math.isfinite, (*a, *b))):
        return "a loss that is not finite: look at the gradient norm and the loss scale in the steps before"
    return _of_the_log(a, b) or _of_the_run(steps, a, b, onset)


def _of_the_run(steps: Sequence[int], a: Sequence[float], b: Sequence[float], onset: int) -> str:
    """Return a cause that lies in the training."""
    apart = [abs(one) for one in signed_distances(a, b)]
    place = steps.index(onset)
    if place:
        # A fault shows before it is beyond all rounding: where it leaves what the first loss shows.
        floor = 30 * max(apart[0], _FINEST)
        place = min(place, next((n for n, one in enumerate(apart) if one > floor), place))
    jump = place > 0 and apart[place] > 20 * max(*apart[:place], _FINEST)
    ends = statistics.mean(apart[-max(len(apart[place:]) // 4, 1) :])
    found = UNKNOWN
    if place == 0:
        found = "other weights, data or model from the start: compare digests of weights and of a batch"
    elif _other_batches(a, b, place):
        found = (
            f"other batches from step {steps[place]} on, as losses rise and fall at other steps: order, seed,"
            " a skipped batch, or the place in the data after a resume"
        )
    elif jump and len(apart) - place >= 8 and ends < max(apart[place : place + 4]) / 4:
        found = (
            f"one step did something else, and training goes on from there: the batch of step {steps[place]},"
            " a skipped update, its gradient norm"
        )
    elif steps[place] - steps[0] <= max(3, steps[1] - steps[0]):
        found = (
            "each update differs from the first on: learning rate or warm-up, constants of the optimizer,"
            " weight decay, clipping, the mean over microbatches; the gradient norm of step 1 tells which"
        )
    elif jump:
        found = (
            f"something switches at step {steps[place]}: the end of warm-up or a schedule's edge, a resume"
            " without the optimizer's state, an epoch"
        )
    return found


def _of_the_log(a: Sequence[float], b: Sequence[float]) -> str | None:
    """Return a cause that lies in what was logged: another unit or mean, or another count of steps."""
    if min((*a, *b)) > 0:
        ratios = [two / one for one, two in zip(a, b, strict=True)]
        middle = statistics.median(ratios)
        if max(ratios) - min(ratios) < 0.02 * middle and abs(middle - 1) > 0.02:
            bits = any(abs(middle / one - 1) < 0.01 for one in (math.log2(math.e), math.log(2)))
            what = (
                "one is in bits, the other in nats"
                if bits
                else "a sum beside a mean, over microbatches, devices, or tokens that are not padding"
            )
            return f"a constant ratio of {middle:.4g}: {what}"
    plain = statistics.mean(abs(one - two) for one, two in zip(a, b, strict=True))
    for lag, which in ((1, "B is one step behind A"), (-1, "B is one step ahead of A")):
        pairs = list(zip(a[:-1], b[1:], strict=True) if lag == 1 else zip(a[1:], b[:-1], strict=True))
        if len(pairs) >= 5 and statistics.mean(abs(one - two) for one, two in pairs) < plain / 20:
            return f"a shift: {which}; one counts steps from 0, or logs after the update"
    return None


def _other_batches(a: Sequence[float], b: Sequence[float], place: int) -> bool:
    """Say whether the losses of two runs rise and fall at other steps from a place on."""
    if len(a) - place < 12:
        return False
    moves = [[two - one for one, two in zip(run[place:], run[place + 1 :], strict=False)] for run in (a, b)]
    if min(map(statistics.pstdev, moves)) == 0:
        return False
    return statistics.correlation(*moves) < 0.5
