"""The layouts of a model on machines that are offered, cheapest first by what is sure of their speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from twinrun.foundation.errors import InputError
from twinrun.predict.calibration import Run, Subject, calibration, rates_of
from twinrun.predict.memory import memory
from twinrun.predict.parallel_layout import Cut, Machines, ParallelLayout, Software, divisors
from twinrun.predict.prediction import Prediction, predict, unknown_time
from twinrun.predict.step import Step
from twinrun.protocol.models.shape import ActivationCheckpointing, ModelShape, ModelWork

RECOMPUTATIONS: tuple[ActivationCheckpointing, ...] = (False, "selective", True)
# Tokens of a sequence that a rank keeps at least where several share it.
LEAST_TOKENS = 1024


@dataclass(frozen=True)
class Search:
    """What was found among all layouts."""

    best: tuple[Prediction, ...]
    """Distinct answers that reach the goal, by their sure price: one for each offer and cut of the model."""
    fastest: Prediction | None
    """The most tokens a second of what surely fits; None where nothing does, or no time can be said."""
    seen: int
    fitting: int
    """Layouts among those seen that divide and surely fit."""
    unknown: tuple[str, ...] = ()
    """Why the time of an offer cannot be said."""
    left_out: tuple[str, ...] = ()
    """Offers that no layout divides."""

    @property
    def unordered(self) -> tuple[str, ...]:
        """GPUs whose best answers have overlapping prices, so that none is said to be cheaper."""
        several = [(one.machines.gpu.name, *one.prices(1.0)[1:]) for one in _best_of_gpus(self.best)]
        return tuple(
            name
            for name, low, high in several
            if any(other != name and least <= high and low <= most for other, least, most in several)
        )


def layouts(
    work: ModelWork, machines: Machines, like: ParallelLayout, software: Software
) -> Iterator[ParallelLayout]:
    """Yield every layout of the global batch of `like` that divides and that the software has."""
    # Megatron counts the embedding and the loss as layers, too.
    counts = {*divisors(work.layers), *divisors(work.layers + 2)}

    def sizes(cut: Cut, whole: int, most: float) -> list[int]:
        return divisors(whole, most) if cut in software.cuts else [1]

    for tensor, pipeline, part, context, experts in product(
        sizes("tensor", machines.devices_per_node, machines.devices),
        sizes("pipeline", machines.devices, work.layers),
        sorted(counts) if "interleaved" in software.cuts else [1],
        sizes("context", work.sequence, max(1, work.sequence // LEAST_TOKENS)),
        sizes("experts", max(one.experts for one in work.block.products), machines.devices),
    ):
        cut = like.replace(
            microbatch=1,
            tensor=tensor,
            pipeline=pipeline,
            interleaved=part,
            context=context,
            experts=experts,
            sequence_parallel=tensor > 1 and "sequence_parallel" in software.cuts,
        )
        if (part > 1 and (pipeline == 1 or part * pipeline not in counts)) or cut.fault(work, machines):
            continue
        share = cut.microbatches(machines.devices)
        for shards, again, microbatch in product(software.shards, RECOMPUTATIONS, divisors(share)):
            one = cut.replace(shards=shards, recomputation=again, microbatch=microbatch)
            # Parts of a stage take whole rounds of the stages.
            if (part == 1 or share // microbatch % pipeline == 0) and software.refuses(one) is None:
                yield one


def best(
    shape: ModelShape,
    offers: Sequence[Machines],
    like: ParallelLayout,
    software: Software,
    runs: Sequence[Run] = (),
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
    work, plain = shape.work(), ParallelLayout(global_batch=like.global_batch, microbatch=1)
    # The cheapest layout of each distinct answer; of equal ones the first, which is the simplest.
    first: dict[tuple[object, ...], tuple[float, Subject]] = {}
    for machines in offers:
        before, asked = seen, Subject(shape, machines, plain.replace(precision=like.precision), software)
        if why := unknown_time(asked):
            unknown[why] = None
            continue
        # Rates know no cuts, so one set is of all layouts.
        rates = rates_of(asked, calibration())
        for one in layouts(work, machines, like, software):
            seen += 1
            if memory(work, one, devices=machines.devices).fit(machines.gpu) != "FITS":
                continue
            fitting += 1
            price = machines.price * Step(work, machines, one, software, rates).time().seconds
            answer = (machines.gpu.id, machines.nodes, one.tensor, one.pipeline, one.context)
            if answer not in first or price < first[answer][0]:
                first[answer] = price, Subject(shape, machines, one, software)
        if seen == before:
            left_out.append(f"{machines.gpu.name}, {machines.nodes} x {machines.devices_per_node} devices")
    if offers and len(left_out) == len(offers):
        tried = f"{like.global_batch} sequences on {'; '.join(left_out)}"
        hint = "--set global_batch, a multiple of the devices"
        raise InputError("no layout divides", place="--sweep", found=tried, hint=hint)
    every = [predict(subject, runs) for _, subject in first.values()]
    unknown |= {one.unknown: None for one in every if one.unknown}
    known = [one for one in every if one.time]
    reaching = sorted((one for one in known if one.rate >= goal), key=_sure)
    gpus = _best_of_gpus(reaching)
    others = [one for one in reaching if one not in gpus]
    return Search(
        best=tuple(sorted([*gpus, *others[: max(0, count - len(gpus))]], key=_sure)),
        fastest=max(known, key=lambda one: one.rate, default=None),
        seen=seen,
        fitting=fitting,
        unknown=tuple(unknown),
        left_out=tuple(left_out),
    )


def _sure(one: Prediction) -> float:
    """Return what a token costs at most, nine times of ten."""
    return one.prices(1.0)[2]


def _best_of_gpus(found: Iterable[Prediction]) -> list[Prediction]:
    """Return the first of each GPU."""
    first: dict[str, Prediction] = {}
    for one in found:
        first.setdefault(one.machines.gpu.id, one)
    return [*first.values()]
