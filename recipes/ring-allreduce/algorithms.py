"""All-reduces beside the ring: a ring of nodes over rings inside them, and through one root."""

from __future__ import annotations

from collections.abc import Callable

import torch
from links import Links
from ring import IN_FLIGHT, Ring, bucket_sizes
from torch import Tensor

Reduce = Callable[[Tensor], None]


def expected_bytes(algorithm: str, buffer_bytes: int, ranks: int) -> tuple[float, str]:
    """Return the bytes of the busiest link in one direction, and the formula.

    Two levels come to the same as one ring: each rank sends (L-1)/L, then 2(M-1)/M of 1/L, then (L-1)/L.
    """
    if algorithm == "naive":
        return float((ranks - 1) * buffer_bytes), "link-bytes/root"
    return 2 * (ranks - 1) / ranks * buffer_bytes, "link-bytes/ring"


def two_level(
    links: Links, *, ranks_per_node: int, bucket_bytes: int | None = None, in_flight: int = IN_FLIGHT
) -> Reduce:
    """Return the all-reduce that sums inside each node, then each part over the nodes.

    Raises:
        ValueError: the ranks do not fill their nodes.
    """
    if ranks_per_node < 1 or links.size % ranks_per_node:
        raise ValueError(f"{links.size} ranks do not fill nodes of {ranks_per_node}")
    node, place = divmod(links.rank, ranks_per_node)
    inside = range(node * ranks_per_node, (node + 1) * ranks_per_node)
    across = range(place, links.size, ranks_per_node)
    inner, outer = (
        Ring(links, members=members, bucket_bytes=bucket_bytes, in_flight=in_flight)
        for members in (inside, across)
    )

    def reduce(buffer: Tensor) -> None:
        outer.all_reduce(inner.reduce_scatter(buffer))
        inner.all_gather(buffer)

    return reduce


def naive(links: Links, *, bucket_bytes: int | None = None) -> Reduce:
    """Return the all-reduce through rank 0, whose link carries n - 1 buffers each way."""
    others = range(1, links.size)

    def reduce(buffer: Tensor) -> None:
        flat = buffer.view(-1)
        longest = bucket_bytes or bucket_sizes(buffer)[2]
        for bucket in flat.split(max(1, longest // flat.element_size())):
            if links.rank:
                links.start(sends=[(bucket, 0)]).wait()
                links.start(receives=[(bucket, 0)]).wait()
                continue
            rooms = [torch.empty_like(bucket) for _ in others]
            links.start(receives=list(zip(rooms, others, strict=True))).wait()
            for room in rooms:
                bucket.add_(room)
            links.start(sends=[(bucket, other) for other in others]).wait()

    return reduce
