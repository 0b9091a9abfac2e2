"""The layouts of a model on given machines, best first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from twinrun.foundation.errors import InputError
from twinrun.predict.calibration import Calibration, Software
from twinrun.predict.memory import memory
from twinrun.predict.parallel_layout import Machines, ParallelLayout, Recomputation, Shards
from twinrun.predict.prediction import Prediction, predict
from twinrun.protocol.models.shape import ModelShape
from twinrun.protocol.work import ModelWork

SHARDS: tuple[Shards, ...] = ("none", "optimizer", "parameters")
RECOMPUTATIONS: tuple[Recomputation, ...] = (False, "selective", True)
MOST_STAGES = 16


def layouts(work: ModelWork, machines: Machines, like: ParallelLayout) -> Iterator[ParallelLayout]:
    """Yield every layout of the global batch of `like` that divides, fullest memory last."""
    tensors = _divisors(machines.devices_per_node)
    stages = [one for one in _divisors(work.layers) if one <= MOST_STAGES]
    for tensor, pipeline, shards, again in product(tensors, stages, SHARDS, RECOMPUTATIONS):
        cut = tensor * pipeline
        if machines.devices % cut or like.global_batch % (machines.devices // cut):
            continue
        for microbatch in _divisors(like.global_batch // (machines.devices // cut)):
            yield replace(
                like,
                tensor=tensor,
                pipeline=pipeline,
                shards=shards,
                recomputation=again,
                microbatch=microbatch,
            )


def best(
    shape: ModelShape,
    machines: Machines,
    like: ParallelLayout,
    *,
    software: Software,
    calibration: Calibration,
    count: int,
) -> tuple[tuple[Prediction, ...], int]:
    """Return the `count` fastest layouts that surely fit, and how many were looked at.

    Equal times stand in the order of least cutting, so the answer is the same every time.
    """
    found: list[Prediction] = []
    work, seen = shape.work(), 0
    for one in layouts(work, machines, like):
        seen += 1
        if memory(work, one, devices=machines.devices).fit(machines.gpu) != "FITS":
            continue
        try:
            one.check(work, machines)
        except InputError:
            continue
        found.append(predict(shape, machines, one, software=software, calibration=calibration, checked=True))
    timed = [one for one in found if one.time is not None]
    return tuple(sorted(timed, key=_seconds)[:count]), seen


def _seconds(one: Prediction) -> float:
    assert one.time is not None
    return one.time.seconds


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
