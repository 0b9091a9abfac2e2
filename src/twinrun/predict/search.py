"""The layouts of a model on machines that are offered, cheapest first by what is sure of their speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.predict.calibration import Calibration, Software
from twinrun.predict.memory import memory
from twinrun.predict.parallel_layout import Machines, ParallelLayout, Recomputation, Shards
from twinrun.predict.prediction import Prediction, distance, predict, timed, unknown_time
from twinrun.protocol.models.shape import ModelShape, ModelWork

SHARDS: tuple[Shards, ...] = ("none", "optimizer", "gradients", "parameters")
RECOMPUTATIONS: tuple[Recomputation, ...] = (False, "selective", True)
MOST_STAGES = 16
# Parts of the model that a stage of a pipeline may have.
PARTS = (1, 2, 4)


@dataclass(frozen=True)
class Offer:
    """Machines that one can have."""

    machines: Machines
    price: float = 1.0
    """Price of a device for an hour; without a price device-hours are counted."""

    def __str__(self) -> str:
        one = self.machines
        return f"{one.gpu.name}, {one.nodes} x {one.devices_per_node} devices"


@dataclass(frozen=True)
class OfferedLayout:
    """One layout on one of the offers."""

    offer: Offer
    prediction: Prediction

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all devices in a second."""
        return (self.prediction.tokens_per_second or 0.0) * self.offer.machines.devices

    @property
    def sure_tokens_per_second(self) -> float:
        """The lower end of their interval."""
        return self.tokens_per_second * math.exp(-self.prediction.half)

    def price(self, tokens: float) -> float:
        """Return what so many tokens cost, device-hours where there is no price."""
        return tokens / (self.prediction.tokens_per_second or 0.0) / 3600 * self.offer.price

    def price_interval(self, tokens: float) -> tuple[float, float]:
        """Return between what it lies, nine times of ten."""
        factor = math.exp(self.prediction.half)
        return self.price(tokens) / factor, self.price(tokens) * factor

    def summary(self) -> dict[str, Any]:
        """Return it for JSON: its prediction, tokens of all devices in a second, and the price of 1e9."""
        rates = {name: getattr(self, name) for name in ("tokens_per_second", "sure_tokens_per_second")}
        return self.prediction.summary() | rates | {"price_of_1e9_tokens": self.price(1e9)}

    def ordered(self, other: OfferedLayout) -> bool:
        """Say whether one is surely cheaper: their intervals do not overlap."""
        (low, high), (least, most) = self.price_interval(1.0), other.price_interval(1.0)
        return high < least or most < low


@dataclass(frozen=True)
class Search:
    """What was found among all layouts."""

    best: tuple[OfferedLayout, ...]
    """Distinct answers that reach the goal, by their sure price: one for each offer and cut of the model."""
    fastest: OfferedLayout | None
    """The most tokens a second of what surely fits; None where nothing does, or no time can be said."""
    seen: int
    fitting: int
    """Layouts among those seen that divide and surely fit."""
    unknown: tuple[str, ...] = ()
    """Why the time of an offer cannot be said."""
    left_out: tuple[str, ...] = ()
    """Offers that no layout divides."""

    @property
    def by_gpu(self) -> tuple[OfferedLayout, ...]:
        """The best of each GPU."""
        first: dict[str, OfferedLayout] = {}
        for one in self.best:
            first.setdefault(one.offer.machines.gpu.id, one)
        return tuple(first.values())


@dataclass(frozen=True)
class _Candidate:
    offer: Offer
    layout: ParallelLayout
    device_tokens: float
    """Tokens of a device in a second."""
    half: float

    @property
    def sure(self) -> float:
        return self.device_tokens * math.exp(-self.half)

    @property
    def all_tokens(self) -> float:
        return self.device_tokens * self.offer.machines.devices

    def order(self) -> tuple[float | int, ...]:
        """Return what cheaper and simpler candidates have less of."""
        one = self.layout
        cuts = (one.tensor * one.pipeline, one.tensor, one.interleaved)
        kept = (SHARDS.index(one.shards), RECOMPUTATIONS.index(one.recomputation), one.microbatch)
        return (self.offer.price / self.sure, self.offer.machines.devices, *cuts, *kept)

    def answer(self) -> tuple[object, ...]:
        """Return what distinct answers differ in."""
        machines = self.offer.machines
        return machines.gpu.id, machines.nodes, self.layout.tensor, self.layout.pipeline


def layouts(work: ModelWork, machines: Machines, like: ParallelLayout) -> Iterator[ParallelLayout]:
    """Yield every layout of the global batch of `like` that divides."""
    tensors = _divisors(machines.devices_per_node)
    stages = [one for one in _divisors(work.layers) if one <= MOST_STAGES]
    for tensor, pipeline, parts in product(tensors, stages, PARTS):
        cut = tensor * pipeline * like.context
        whole = machines.devices % cut == 0 and like.global_batch % (machines.devices // cut) == 0
        if not whole or (parts > 1 and (pipeline == 1 or work.layers % (pipeline * parts))):
            continue
        share = like.global_batch // (machines.devices // cut)
        # Parts of a stage take whole rounds of the stages.
        sizes = [size for size in _divisors(share) if parts == 1 or share // size % pipeline == 0]
        for shards, again, microbatch in product(SHARDS, RECOMPUTATIONS, sizes):
            yield replace(
                like,
                tensor=tensor,
                pipeline=pipeline,
                interleaved=parts,
                shards=shards,
                recomputation=again,
                microbatch=microbatch,
            )


def best(
    shape: ModelShape,
    offers: Sequence[Offer],
    like: ParallelLayout,
    *,
    software: Software,
    calibration: Calibration,
    count: int,
    goal: float = 0.0,
) -> Search:
    """Return the `count` cheapest distinct answers that surely fit, the same every time.

    Args:
        goal: tokens a second of all devices that a layout must reach.

    Raises:
        InputError: no offer has a layout that divides.
    """
    found, seen, unknown, left_out = list[_Candidate](), 0, dict[str, None](), list[str]()
    for offer in offers:
        if why := unknown_time(shape, offer.machines, like, software):
            unknown[why] = None
            continue
        count_of_offer, candidates, far = _candidates(shape, offer, like, software, calibration)
        seen += count_of_offer
        found += candidates
        unknown |= dict.fromkeys(far)
        if not count_of_offer:
            left_out.append(str(offer))
    if offers and len(left_out) == len(offers):
        raise InputError(
            "no layout divides",
            place="--sweep",
            found=f"{like.global_batch} sequences on {'; '.join(left_out)}",
            hint="--set global_batch, a multiple of the devices",
        )

    terms = {"software": software, "calibration": calibration}

    def placed(one: _Candidate) -> OfferedLayout:
        return OfferedLayout(one.offer, predict(shape, one.offer.machines, one.layout, checked=True, **terms))  # type: ignore[arg-type]

    fastest = max(found, key=lambda one: one.all_tokens, default=None)
    return Search(
        best=tuple(placed(one) for one in _distinct(found, goal=goal, count=count)),
        fastest=placed(fastest) if fastest else None,
        seen=seen,
        fitting=len(found),
        unknown=tuple(unknown),
        left_out=tuple(left_out),
    )


def _distinct(found: Sequence[_Candidate], *, goal: float, count: int) -> list[_Candidate]:
    """Return the best of each GPU that reaches the goal, and what is cheapest, by the sure price."""
    first: dict[tuple[object, ...], _Candidate] = {}
    for one in sorted(found, key=_Candidate.order):
        if one.all_tokens >= goal:
            first.setdefault(one.answer(), one)
    gpus: dict[str, _Candidate] = {}
    for one in first.values():
        gpus.setdefault(one.offer.machines.gpu.id, one)
    best_of_each = [*gpus.values()]
    others = [one for one in first.values() if one not in best_of_each]
    return sorted([*best_of_each, *others[: max(0, count - len(gpus))]], key=_Candidate.order)


def _candidates(
    shape: ModelShape, offer: Offer, like: ParallelLayout, software: Software, calibration: Calibration
) -> tuple[int, list[_Candidate], list[str]]:
    """Return the count of an offer's layouts, those that surely fit, and why nothing is said of others."""
    work, machines, seen = shape.work(), offer.machines, 0
    found, far = list[_Candidate](), dict[str, None]()
    for layout in layouts(work, machines, like):
        seen += 1
        if memory(work, layout, devices=machines.devices).fit(machines.gpu) != "FITS":
            continue
        if not _divides(layout, work, machines):
            continue
        half, _, why = distance(shape, machines, layout, software, calibration)
        if why:
            far[why] = None
            continue
        time = timed(work, machines, layout, software, calibration)
        tokens = layout.global_batch * work.sequence / time.seconds / machines.devices
        found.append(_Candidate(offer, layout, tokens, half))
    return seen, found, [*far]


def unordered(found: Search) -> tuple[str, ...]:
    """Return the GPUs whose best answers have overlapping prices, so that none is said to be cheaper."""
    gpus = found.by_gpu
    names = dict.fromkeys(
        one.offer.machines.gpu.name
        for one in gpus
        if any(other is not one and not one.ordered(other) for other in gpus)
    )
    return tuple(names)


def _divides(layout: ParallelLayout, work: ModelWork, machines: Machines) -> bool:
    try:
        layout.check(work, machines)
    except InputError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
