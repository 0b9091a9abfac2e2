"""The layouts of a model on machines that are offered, cheapest first by what is sure of their speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.predict.calibration import Basis, Cut, Software, Subject, rates_of
from twinrun.predict.memory import memory
from twinrun.predict.parallel_layout import Machines, ParallelLayout, Recomputation, Shards
from twinrun.predict.prediction import Prediction, predict, unknown_time
from twinrun.predict.step import step_time
from twinrun.protocol.models.shape import ModelShape, ModelWork

CUTS = tuple(one.name for one in fields(ParallelLayout))[:8]
SHARDS: tuple[Shards, ...] = ("none", "optimizer", "gradients", "parameters")
RECOMPUTATIONS: tuple[Recomputation, ...] = (False, "selective", True)
# Tokens of a sequence that a rank keeps at least where several share it.
LEAST_TOKENS = 1024


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

    def price(self, tokens: float) -> float:
        """Return what so many tokens cost, device-hours where there is no price."""
        return tokens / (self.prediction.tokens_per_second or 0.0) / 3600 * self.offer.price

    def price_interval(self, tokens: float) -> tuple[float, float]:
        """Return between what it lies, nine times of ten."""
        factor = math.exp(self.prediction.half)
        return self.price(tokens) / factor, self.price(tokens) * factor

    def summary(self) -> dict[str, Any]:
        """Return it for JSON: its prediction, tokens of all devices in a second, and the price of 1e9."""
        rates = {"tokens_per_second": self.tokens_per_second}
        rates["sure_tokens_per_second"] = self.tokens_per_second * math.exp(-self.prediction.half)
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


def _order(offer: Offer, layout: ParallelLayout, seconds: float) -> tuple[float | int, ...]:
    """Return what cheaper and simpler layouts have less of."""
    cuts = (layout.tensor * layout.pipeline * layout.context, layout.tensor, layout.interleaved)
    kept = (SHARDS.index(layout.shards), RECOMPUTATIONS.index(layout.recomputation), layout.microbatch)
    return (offer.price * seconds, *cuts, *kept)


def layouts(
    work: ModelWork, machines: Machines, like: ParallelLayout, software: Software
) -> Iterator[ParallelLayout]:
    """Yield every layout of the global batch of `like` that divides and that the software has."""
    devices, products = machines.devices, work.block.products

    def sizes(cut: Cut, whole: int, most: float = math.inf) -> list[int]:
        return [one for one in (_divisors(whole) if cut in software.cuts else [1]) if one <= most]

    tensors = [
        one
        for one in sizes("tensor", machines.devices_per_node)
        if all(getattr(each, each.cut) % one == 0 for each in products)
    ]
    cuts = product(
        tensors,
        sizes("pipeline", devices, work.layers),
        sizes("context", work.sequence, max(1, work.sequence // LEAST_TOKENS)),
        sizes("experts", max(one.experts for one in products)),
    )
    for tensor, pipeline, context, experts in cuts:
        group, copies = tensor * pipeline * context, devices // (tensor * pipeline)
        if devices % group or experts > copies or like.global_batch % (devices // group):
            continue
        share = like.global_batch * group // devices
        # Megatron counts the embedding and the loss as layers, too.
        wholes = [whole for whole in (work.layers, work.layers + 2) if whole % pipeline == 0]
        parts = {1, *(part for whole in wholes for part in _divisors(whole // pipeline))}
        parts = parts if pipeline > 1 and "interleaved" in software.cuts else {1}
        kept = product(sorted(parts), software.shards, RECOMPUTATIONS, _divisors(share))
        for part, shards, again, microbatch in kept:
            # Parts of a stage take whole rounds of the stages.
            if part > 1 and ((share // microbatch) % pipeline or part * pipeline > work.layers + 2):
                continue
            sequence = tensor > 1 and "sequence_parallel" in software.cuts
            made = (like.global_batch, microbatch, tensor, pipeline, part, context, experts, sequence)
            fields_of: dict[str, Any] = dict(zip(CUTS, made, strict=True))
            one = replace(like, **fields_of, shards=shards, recomputation=again)
            if software.refuses(one) is None:
                yield one


def best(
    shape: ModelShape,
    offers: Sequence[Offer],
    like: ParallelLayout,
    basis: Basis,
    *,
    count: int,
    goal: float = 0.0,
) -> Search:
    """Return the `count` cheapest distinct answers that surely fit, the same every time.

    Args:
        goal: tokens a second of all devices that a layout must reach.

    Raises:
        InputError: no offer has a layout that divides.
    """
    seen, fitting, unknown, left_out = 0, 0, dict[str, None](), list[str]()
    work, plain = shape.work(), ParallelLayout(like.global_batch, 1, precision=like.precision)
    # The best layout of each distinct answer.
    first: dict[tuple[object, ...], tuple[tuple[float, ...], Offer, ParallelLayout]] = {}
    for offer in offers:
        machines, before = offer.machines, seen
        asked = Subject(shape, machines, plain, basis.software)
        if why := unknown_time(asked):
            unknown[why] = None
            continue
        # Rates know no cuts, so one set is of all layouts.
        rates, traits = rates_of(asked, basis.known), asked.traits
        for layout in layouts(work, machines, like, basis.software):
            seen += 1
            if memory(work, layout, devices=machines.devices).fit(machines.gpu) != "FITS":
                continue
            fitting += 1
            seconds = step_time(work, machines, layout, traits, rates).seconds
            answer = (machines.gpu.id, machines.nodes, layout.tensor, layout.pipeline, layout.context)
            one = (_order(offer, layout, seconds), offer, layout)
            first[answer] = min(one, first.get(answer, one), key=lambda each: each[0])
        if seen == before:
            left_out.append(str(offer))
    if offers and len(left_out) == len(offers):
        tried, hint = (
            f"{like.global_batch} sequences on {'; '.join(left_out)}",
            "--set global_batch, a multiple",
        )
        raise InputError("no layout divides", place="--sweep", found=tried, hint=f"{hint} of the devices")
    every = [
        OfferedLayout(offer, predict(shape, offer.machines, layout, basis, checked=True))
        for _, offer, layout in first.values()
    ]
    unknown |= {one.prediction.unknown: None for one in every if one.prediction.unknown}
    known = [one for one in every if one.prediction.time]
    return Search(
        best=_shown(known, goal=goal, count=count),
        fastest=max(known, key=lambda one: one.tokens_per_second, default=None),
        seen=seen,
        fitting=fitting,
        unknown=tuple(unknown),
        left_out=tuple(left_out),
    )


def _shown(known: Sequence[OfferedLayout], *, goal: float, count: int) -> tuple[OfferedLayout, ...]:
    """Return the best of each GPU that reaches the goal, and what is cheapest, by the sure price."""

    def sure(one: OfferedLayout) -> float:
        return one.price_interval(1.0)[1]

    reaching = sorted((one for one in known if one.tokens_per_second >= goal), key=sure)
    gpus: dict[str, OfferedLayout] = {}
    for one in reaching:
        gpus.setdefault(one.offer.machines.gpu.id, one)
    others = [one for one in reaching if one not in gpus.values()]
    return tuple(sorted([*gpus.values(), *others[: max(0, count - len(gpus))]], key=sure))


def unordered(found: Search) -> tuple[str, ...]:
    """Return the GPUs whose best answers have overlapping prices, so that none is said to be cheaper."""
    gpus = found.by_gpu
    names = dict.fromkeys(
        one.offer.machines.gpu.name
        for one in gpus
        if any(other is not one and not one.ordered(other) for other in gpus)
    )
    return tuple(names)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
