"""The layouts of a model on machines that are offered, cheapest first among those that reach a goal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from twinrun.foundation.errors import InputError
from twinrun.predict.calibration import Calibration, Software
from twinrun.predict.memory import memory
from twinrun.predict.parallel_layout import Machines, ParallelLayout, Recomputation, Shards
from twinrun.predict.prediction import Prediction, predict, unknown_time
from twinrun.predict.step import step_time
from twinrun.protocol.models.shape import ModelShape
from twinrun.protocol.work import ModelWork

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


@dataclass(frozen=True)
class Search:
    """What was found among all layouts."""

    best: tuple[OfferedLayout, ...]
    """Cheapest first, those that reach the goal."""
    fastest: OfferedLayout | None
    """The most tokens a second of what surely fits; None where nothing does, or no time can be said."""
    seen: int
    fitting: int
    """Layouts among those seen that divide and surely fit."""
    unknown: tuple[str, ...] = ()
    """Why the time of an offer cannot be said."""


@dataclass(frozen=True)
class _Candidate:
    offer: Offer
    layout: ParallelLayout
    device_tokens: float
    """Tokens of a device in a second."""

    def order(self) -> tuple[float | int, ...]:
        """Return what cheaper and simpler candidates have less of."""
        one = self.layout
        cuts = (one.tensor * one.pipeline, one.tensor, one.interleaved)
        kept = (SHARDS.index(one.shards), RECOMPUTATIONS.index(one.recomputation), one.microbatch)
        return (self.offer.price / self.device_tokens, self.offer.machines.devices, *cuts, *kept)


def layouts(work: ModelWork, machines: Machines, like: ParallelLayout) -> Iterator[ParallelLayout]:
    """Yield every layout of the global batch of `like` that divides."""
    tensors = _divisors(machines.devices_per_node)
    stages = [one for one in _divisors(work.layers) if one <= MOST_STAGES]
    for tensor, pipeline, parts in product(tensors, stages, PARTS):
        cut = tensor * pipeline
        whole = machines.devices % cut == 0 and like.global_batch % (machines.devices // cut) == 0
        if not whole or (parts > 1 and (pipeline == 1 or work.layers % (pipeline * parts))):
            continue
        sizes = _divisors(like.global_batch // (machines.devices // cut))
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
    """Return the `count` cheapest layouts that surely fit, the same every time.

    Args:
        goal: tokens a second of all devices that a layout must reach.
    """
    work, found, seen, unknown = shape.work(), list[_Candidate](), 0, dict[str, None]()
    for offer in offers:
        machines = offer.machines
        if why := unknown_time(shape, machines, like, software):
            unknown[why] = None
            continue
        for layout in layouts(work, machines, like):
            seen += 1
            if memory(work, layout, devices=machines.devices).fit(machines.gpu) == "FITS" and _divides(
                layout, work, machines
            ):
                time = step_time(work, machines, layout, software=software, calibration=calibration)
                tokens = layout.global_batch * work.sequence / time.seconds / machines.devices
                found.append(_Candidate(offer, layout, tokens))

    def placed(one: _Candidate) -> OfferedLayout:
        terms = {"software": software, "calibration": calibration}
        return OfferedLayout(one.offer, predict(shape, one.offer.machines, one.layout, checked=True, **terms))  # type: ignore[arg-type]

    ordered = sorted(found, key=_Candidate.order)
    reaching = [one for one in ordered if _all_tokens(one) >= goal]
    fastest = max(ordered, key=_all_tokens, default=None)
    return Search(
        best=tuple(placed(one) for one in reaching[:count]),
        fastest=placed(fastest) if fastest else None,
        seen=seen,
        fitting=len(found),
        unknown=tuple(unknown),
    )


def _all_tokens(one: _Candidate) -> float:
    return one.device_tokens * one.offer.machines.devices


def _divides(layout: ParallelLayout, work: ModelWork, machines: Machines) -> bool:
    try:
        layout.check(work, machines)
    except InputError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
