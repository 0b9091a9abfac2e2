"""Bandwidth and latency of each node, held against its peers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from peers import demand_peers, gathered, host, join, slow

from twinrun.protocol.checks import ChecksJob
from twinrun.train.checks import Failed

BYTES, LATENCY_BYTES = 16 << 20, 8
REPEATS = 5
REMEDY = "see speed, duplex and error counters of its interface and switch port; exclude it until then"


def link_performance(job: ChecksJob) -> None:
    """Exchange large and small messages between neighbouring nodes."""

    def exchange(links: Any, pair: tuple[int, int], buffer: Any) -> None:
        other = pair[1] if links.rank == pair[0] else pair[0]
        arrived = buffer.new_empty(buffer.shape)
        links.start(sends=[(buffer, other)], receives=[(arrived, other)]).wait()

    _compare(job, exchange, BYTES, "GB/s of a link")
    _compare(job, exchange, LATENCY_BYTES, "messages of 8 bytes, GB/s")


def collective_performance(job: ChecksJob) -> None:
    """Reduce a buffer between neighbouring nodes, so that one slow node does not slow all."""
    from twinrun.train.collectives.ring import Ring  # noqa: PLC0415 - only in the check's own process

    def reduce(links: Any, pair: tuple[int, int], buffer: Any) -> None:
        Ring(links, members=pair).all_reduce(buffer)

    _compare(job, reduce, BYTES, "GB/s of an all-reduce")


def _compare(job: ChecksJob, move: Callable[[Any, tuple[int, int], Any], None], size: int, what: str) -> None:
    device = join_once(job)
    rates = measured(device, move, size)
    demand_peers(rates, what)
    found = slow(rates)
    if found:
        median = statistics.median(rates.values())
        shown = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
        raise Failed(f"{what}: {shown}, peers {median:.3g}", remedy=REMEDY, nodes=list(found))


def measured(device: Any, move: Callable[[Any, tuple[int, int], Any], None], size: int) -> dict[str, float]:
    """Return by node the better of its rates with the node before and the node after it, in GB/s.

    A slow node slows both of its pairs; its neighbours have another pair each.
    """
    import torch  # noqa: PLC0415

    from twinrun.train.collectives.links import Links  # noqa: PLC0415

    links = Links()
    firsts: dict[str, int] = {}
    for rank, name in enumerate(gathered(host(), device)):
        firsts.setdefault(name, rank)
    nodes, ranks = list(firsts), list(firsts.values())
    buffer, rates = torch.zeros(size // 4, device=device), {}
    for place in range(len(nodes)) if len(nodes) > 1 else ():
        pair = (ranks[place], ranks[(place + 1) % len(nodes)])
        spent = 0.0
        if links.rank in pair:
            spent = statistics.median(
                timed(lambda pair=pair: move(links, pair, buffer)) for _ in range(REPEATS)
            )
        rate = size / max(gathered(spent, device)) / 1e9
        for name in (nodes[place], nodes[(place + 1) % len(nodes)]):
            rates[name] = max(rates.get(name, 0.0), rate)
    return rates


def timed(call: Callable[[], None]) -> float:
    """Return the seconds of a call, the device's part included."""
    import torch  # noqa: PLC0415

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
