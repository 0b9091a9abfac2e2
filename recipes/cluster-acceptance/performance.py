"""Bandwidth and latency of each node, held against its peers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from peers import LEAST_SHARE, demand_peers, exchange, gathered, host, join, slow

from twinrun.protocol.checks import ChecksJob
from twinrun.train.checks import CheckError

# Bytes of a message, and how many are sent: what they take at best is the link, the rest is other work.
# A pair for which the first take long is as slow as they say, and no more is sent.
LARGE, SMALL = ((1 << 20, 1), (16 << 20, 5)), ((8, 50),)
LONG_SECONDS = 0.1
# What looks slow is measured again, all nodes in turns: other work on a node passes, a bad link stays.
ROUNDS = 8
# Small messages take different ways through switches; what is wrong takes many times as long.
LATENCY_SHARE = 0.5
REMEDY = "see speed, duplex and error counters of its interface and switch port; exclude it until then"
Move = Callable[[int, bool, Any], None]
"""Takes the other rank of a pair, whether this one is its first, and what is moved."""
Messages = Sequence[tuple[int, int]]


def link_performance(job: ChecksJob) -> None:
    """Exchange large and small messages between neighbouring nodes."""

    def move(other: int, _first: bool, buffer: Any) -> None:
        exchange(buffer, other, buffer.new_empty(buffer.shape), other)

    _compare(job, move, LARGE, "GB/s of a link")
    _compare(job, move, SMALL, "messages of 8 bytes, GB/s", share=LATENCY_SHARE)


def collective_performance(job: ChecksJob) -> None:
    """Reduce a buffer between neighbouring nodes, so that one slow node does not slow all."""

    def reduce(other: int, first: bool, buffer: Any) -> None:
        halves = buffer.tensor_split(2)
        own, given = halves if first else reversed(halves)
        arrived = own.new_empty(own.shape)
        exchange(given, other, arrived, other)
        own.add_(arrived)
        exchange(own, other, given, other)

    _compare(job, reduce, LARGE, "GB/s of an all-reduce")


def _compare(
    job: ChecksJob, move: Move, messages: Messages, what: str, *, share: float = LEAST_SHARE
) -> None:
    device, samples = join_once(job), dict[str, list[float]]()
    for _ in range(ROUNDS):
        for name, rate in measured(device, move, messages).items():
            samples.setdefault(name, []).append(rate)
        demand_peers(samples, what)
        # All ranks have the same rates, so all measure again or none.
        if not (found := slow(samples, share=share)):
            return
    median = statistics.median(max(values) for values in samples.values())
    shown = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
    raise CheckError(f"{what}: {shown}, peers {median:.3g}", remedy=REMEDY, nodes=list(found))


def measured(device: Any, move: Move, messages: Messages) -> dict[str, float]:
    """Return by node the better of its rates with the node before and the node after it, in GB/s.

    A slow node slows both of its pairs; its neighbours have another pair each.
    """
    firsts: dict[str, int] = {}
    for rank, name in enumerate(gathered(host(), device)):
        firsts.setdefault(name, rank)
    nodes, ranks = list(firsts), list(firsts.values())
    rates: dict[str, float] = {}
    for place in range(len(nodes)) if len(nodes) > 1 else ():
        pair = (ranks[place], ranks[(place + 1) % len(nodes)])
        rate = _rate(device, move, messages, pair=pair)
        for name in (nodes[place], nodes[(place + 1) % len(nodes)]):
            rates[name] = max(rates.get(name, 0.0), rate)
    return rates


def _rate(device: Any, move: Move, messages: Messages, *, pair: tuple[int, int]) -> float:
    """Return the GB/s of a pair for the last of `messages`, or for the first that take long."""
    import torch  # noqa: PLC0415 - only in the check's own process
    import torch.distributed as dist  # noqa: PLC0415

    rank, rate = dist.get_rank(), 0.0
    other = pair[rank == pair[0]]
    for size, count in messages:
        spent, buffer = 0.0, torch.zeros(max(1, size // 4), device=device)
        if rank in pair:
            call = partial(move, other, rank == pair[0], buffer)
            spent = min(timed(call) for _ in range(count))
        slowest = max(gathered(spent, device))
        rate = size / slowest / 1e9
        if slowest > LONG_SECONDS:
            break
    return rate


def timed(call: Callable[[], None]) -> float:
    """Return the seconds of a call, the device's part included."""
    import torch  # noqa: PLC0415 - only in the check's own process

    began = time.perf_counter()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def join_once(job: ChecksJob) -> Any:
    """Join the other ranks unless this process has."""
    import torch.distributed as dist  # noqa: PLC0415

    from twinrun.train.device import device_of  # noqa: PLC0415

    return device_of(job) if dist.is_initialized() else join(job)
