"""Two records side by side: what differs, how much faster one is and why, how far the losses are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from twinrun.circumstances import Difference, Grade, circumstances, differences, flat
from twinrun.errors import InputError
from twinrun.judge import largest_difference
from twinrun.manifest import Frozen
from twinrun.record import PointRecord, Record

# A sentence names no more reasons than this; the table has all.
MAX_REASONS = 3


class Side(Frozen):
    """A measured point as one side of a pair."""

    point: str
    devices: int
    microbatch: int
    tokens_per_second: float
    """Of one device."""
    model_tflops: float
    """Of one device."""
    utilisation: float | None


class LossDistance(Frozen):
    """The largest relative difference between two loss curves."""

    value: float
    step: int
    steps: int


class Pair(Frozen):
    """Two points side by side; ratios are B over A."""

    a: Side
    b: Side
    tokens_ratio: float
    flops_ratio: float
    within_spread: bool
    """Whether the extremes of the timed steps overlap."""
    loss: LossDistance | None
    loss_note: str
    """What the distance means, or why there is none."""


class Comparison(Frozen):
    """Two records of one recipe."""

    recipe: str
    formula: str
    run_a: str
    run_b: str
    sha256_a: str
    sha256_b: str
    summary: str
    pairing: str
    """Which points are compared, and why these."""
    pairs: tuple[Pair, ...]
    differences: tuple[Difference, ...]
    """Largest likely effect on speed first."""


def compare(a: Record, b: Record) -> Comparison:
    """Put two records of one recipe side by side.

    Raises:
        InputError: another recipe, another FLOP formula, other units, or no point.
    """
    _demand_comparable(a, b)
    points, pairing = _paired(a, b)
    pairs = tuple(_pair(a, b, one, other) for one, other in points)
    found = differences(circumstances(a, points[-1][0]), circumstances(b, points[-1][1]))
    return Comparison(
        recipe=a.plan.recipe,
        formula=points[-1][0].model_flops.formula,
        run_a=a.run,
        run_b=b.run,
        sha256_a=a.digest(),
        sha256_b=b.digest(),
        summary=_summary(pairs[-1], found),
        pairing=pairing,
        pairs=pairs,
        differences=found,
    )


def _demand_comparable(a: Record, b: Record) -> None:
    _demand_equal("the records are of different recipes", {a.plan.recipe}, {b.plan.recipe})
    for record in (a, b):
        if not record.points:
            raise InputError("the record has no point", place=record.run)
    _demand_equal("FLOP are counted by different formulas", _formulas(a), _formulas(b))
    _demand_equal("rates are in different units", _units(a), _units(b))


def _demand_equal(message: str, a: set[str], b: set[str]) -> None:
    if a != b or len(a) > 1:
        raise InputError(
            message,
            found=f"{', '.join(sorted(a))} and {', '.join(sorted(b))}",
            allowed="the same in both records",
            hint="compare records of one recipe that were written by the same version of twinrun",
        )


def _formulas(record: Record) -> set[str]:
    return {point.model_flops.formula for point in record.points}


def _units(record: Record) -> set[str]:
    pairs = ((point.tokens_per_second, point.model_flops.rate) for point in record.points)
    return {" and ".join(f"{rate.unit} per {rate.per}" for rate in pair) for pair in pairs}


def _paired(a: Record, b: Record) -> tuple[list[tuple[PointRecord, PointRecord]], str]:
    """Pair the points of the same name, or the largest of each when there are none."""
    pairs = [(one, other) for one in a.points if (other := b.point(one.id))]
    pairs.sort(key=lambda pair: pair[0].devices)
    if pairs:
        return pairs, "those of the same name"
    one, other = (max(record.points, key=lambda point: point.devices) for record in (a, b))
    return [(one, other)], f"none has the same name, so the largest of each: {one.id} of A, {other.id} of B"


def _pair(a: Record, b: Record, one: PointRecord, other: PointRecord) -> Pair:
    mine, theirs = one.model_flops.rate, other.model_flops.rate
    loss, note = _loss(a, b, one, other)
    return Pair(
        a=_side(one),
        b=_side(other),
        tokens_ratio=other.tokens_per_second.median / one.tokens_per_second.median,
        flops_ratio=theirs.median / mine.median,
        within_spread=mine.low <= theirs.high and theirs.low <= mine.high,
        loss=loss,
        loss_note=note,
    )


def _side(point: PointRecord) -> Side:
    return Side(
        point=point.id,
        devices=point.devices,
        microbatch=point.microbatch,
        tokens_per_second=point.tokens_per_second.median,
        model_tflops=point.model_flops.rate.median,
        utilisation=point.utilisation.value if point.utilisation else None,
    )


# How a step is computed, not what: rounding aside, these leave the loss as it is.
ROUNDING_ONLY = {"microbatch", "sharding", "attention", "activation_checkpointing", "compile", "warmup_steps"}


def _loss(a: Record, b: Record, one: PointRecord, other: PointRecord) -> tuple[LossDistance | None, str]:
    obstacle = _obstacle(a, b, one, other)
    if obstacle:
        return None, f"not comparable: {obstacle}"
    value, step = largest_difference([one.losses, other.losses])
    if math.isnan(value):
        return None, f"not comparable: at step {step} a loss is not finite or a curve has ended"
    return LossDistance(value=value, step=step, steps=len(one.losses)), "same tokens in the same order"


def _obstacle(a: Record, b: Record, one: PointRecord, other: PointRecord) -> str | None:
    changed = [name for name in _trained(a) if _trained(a)[name] != _trained(b).get(name)]
    if changed:
        return f"another configuration ({', '.join(changed)})"
    if one.data_hash != other.data_hash:
        return "other data (the token streams have different hashes)"
    if one.order_hash != other.order_hash:
        return "another order of batches (the order hashes differ)"
    return None if one.losses else "no loss was recorded"


def _trained(record: Record) -> dict[str, str]:
    training = {
        name: value for name, value in flat(record.plan.training).items() if name not in ROUNDING_ONLY
    }
    return training | {f"shape.{name}": value for name, value in flat(record.plan.shape).items()}


def _summary(pair: Pair, found: Sequence[Difference]) -> str:
    where = pair.a.point if pair.a.point == pair.b.point else f"{pair.b.point} against {pair.a.point}"
    head = f"B is {pair.flops_ratio:.2f}x A in model FLOP/s per device at {where}"
    if pair.within_spread:
        return f"{head}, within the spread of the timed steps"
    likely = [f"{one.name} {one.a} -> {one.b}" for one in found if one.speed == _strongest(found)]
    if not likely:
        return f"{head}; nothing recorded explains it"
    because = "only small things differ" if _strongest(found) == "small" else "most likely because"
    return f"{head}; {because}: {'; '.join(likely[:MAX_REASONS])}"


def _strongest(found: Iterable[Difference]) -> Grade | None:
    """Return the highest grade of a likely effect on speed, None when nothing has any."""
    grades: tuple[Grade, ...] = ("large", "some", "small")
    present = {one.speed for one in found}
    return next((grade for grade in grades if grade in present), None)
