"""Ring all-reduce: each rank sends to its neighbour alone, and all links carry data at once.

A buffer is cut into as many chunks as the ring has members. In n - 1 steps each chunk is summed on its way
around, in n - 1 more it is handed around whole: a link carries 2 (n - 1) / n of the buffer. Chunks travel in
buckets, so that a sum is computed while the next bucket is under way.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from compression import Codec
from links import Links, Transfer
from torch import Tensor

IN_FLIGHT = 4

Buckets = list[list[Tensor]]
Start = Callable[[int, int], tuple[Transfer, Callable[[], object]]]


# Buckets of a chunk, unless they would be shorter or longer than these bytes: short ones cost a start each,
# long ones are summed while nothing is under way.
# Measured on three nodes at 1 Gbit/s: 1 MiB is faster than 32 MiB.
HOST_BUCKETS = (16, 1 << 20, 32 << 20)
# Two H200s sum 1 GB in 3.16 ms with one bucket a chunk, in 3.63 with two and in 3.83 with four; two H100s in
# int8 in 1.93 with one, in 2.60 with four: the host starts short ones more slowly than they move.
GPU_BUCKETS = (1, 16 << 20, 1 << 30)


def bucket_sizes(buffer: Tensor) -> tuple[int, int, int]:
    """Return how many buckets a chunk has, and the bytes of the shortest and the longest, by the device."""
    return GPU_BUCKETS if buffer.is_cuda else HOST_BUCKETS


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A buffer on its way."""

    chunks: Buckets
    lost: Buckets | None
    """What compression loses of each bucket."""
    arrived: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Payloads that are not yet added, by chunk and bucket."""


class Ring:
    """A ring of some ranks; each member calls the same functions with buffers of the same size."""

    def __init__(
        self,
        links: Links,
        *,
        members: Sequence[int] | None = None,
        bucket_bytes: int | None = None,
        in_flight: int = IN_FLIGHT,
        codec: Codec | None = None,
    ) -> None:
        """Set up the ring.

        Args:
            members: ranks in the order of the ring, this one among them; all when left out.
            bucket_bytes: most bytes of a bucket; follows from the buffer when left out.
            in_flight: buckets under way at once; with 1 nothing overlaps.
            codec: how transfers are compressed, if at all.
        """
        self._links = links
        self._members = tuple(range(links.size) if members is None else members)
        self._place = self._members.index(links.rank)
        self._bucket_bytes, self._in_flight = bucket_bytes, in_flight
        self._codec = codec

    @property
    def size(self) -> int:
        """Members."""
        return len(self._members)

    @property
    def owned(self) -> int:
        """The chunk that this rank has whole after `reduce_scatter`."""
        return (self._place + 1) % self.size

    def all_reduce(self, buffer: Tensor, *, residual: Tensor | None = None) -> None:
        """Sum `buffer` over the members, in place.

        Args:
            residual: what compression lost before, of the size of `buffer`; added now, and replaced by what
                is lost now.
        """
        work = self._work(buffer, residual)
        # One pipeline: the first buckets are handed around whole while the last ones are still summed.
        self._run(work, [self._sum_of(work), self._copies_of(work)])

    def reduce_scatter(self, buffer: Tensor) -> Tensor:
        """Return the chunk of `buffer` that this rank has whole; the other chunks hold partial sums.

        Raises:
            ValueError: the ring compresses; what came last is added when it leaves again, in `all_reduce`.
        """
        if self._codec is not None:
            raise ValueError("a ring that compresses does not stop halfway: call all_reduce")
        work = self._work(buffer)
        self._run(work, [self._sum_of(work)])
        return buffer.view(-1).tensor_split(self.size)[self.owned]

    def all_gather(self, buffer: Tensor) -> None:
        """Hand every member's owned chunk of `buffer` around."""
        work = self._work(buffer)
        self._run(work, [self._copies_of(work)])

    def _sum_of(self, work: _Work) -> Start:
        """Return what sends a bucket in a step, and adds the one that comes to ours."""

        def start(step: int, bucket: int) -> tuple[Transfer, Callable[[], object]]:
            leaving, coming = (self._place - step) % self.size, (self._place - step - 1) % self.size
            payload = self._payload(work, leaving, bucket)
            arrived = self._room(work.chunks[coming][bucket])
            return self._move(payload, arrived), lambda: self._add(work, coming, bucket, arrived)

        return start

    def _copies_of(self, work: _Work) -> Start:
        """Return what sends a whole bucket in a step, and keeps the one that comes."""
        # Compressed once and passed on as it came: every rank decodes the same bytes, the owner too.
        payloads: dict[tuple[int, int], Tensor] = {}

        def start(step: int, bucket: int) -> tuple[Transfer, Callable[[], object]]:
            leaving, coming = (self.owned - step) % self.size, (self.owned - step - 1) % self.size
            target = work.chunks[coming][bucket]
            if step == 0:
                payloads[leaving, bucket] = self._payload(work, leaving, bucket)
            payload = payloads.pop((leaving, bucket))
            arrived = target if self._codec is None else self._room(target)
            payloads[coming, bucket] = arrived
            transfer = self._move(payload, arrived)
            if step == 0:
                # While it is under way.
                self._keep(work.chunks[leaving][bucket], payload)
            return transfer, lambda: self._keep(target, arrived)

        return start

    def _run(self, work: _Work, phases: Sequence[Start]) -> None:
        """Move every bucket through every step of the phases, `in_flight` of them at once."""
        count = len(work.chunks[0])
        # No more than a step has: a bucket leaves with what the step before made of it.
        window = min(self._in_flight, count)
        under_way: deque[tuple[Transfer, Callable[[], object]]] = deque()

        def finish() -> None:
            transfer, absorb = under_way.popleft()
            transfer.wait()
            absorb()

        for start, step, bucket in itertools.product(phases, range(self.size - 1), range(count)):
            if len(under_way) == window:
                finish()
            under_way.append(start(step, bucket))
        while under_way:
            finish()

    def _move(self, payload: Tensor, arrived: Tensor) -> Transfer:
        following = self._members[(self._place + 1) % self.size]
        preceding = self._members[(self._place - 1) % self.size]
        return self._links.start(sends=[(payload, following)], receives=[(arrived, preceding)])

    def _buckets(self, buffer: Tensor) -> Buckets:
        """Return the buckets of each chunk; all chunks have as many, so that both ends cut alike."""
        flat = buffer.view(-1)
        longest = -(-flat.numel() // self.size) * flat.element_size()
        buckets, least, most = bucket_sizes(buffer)
        limit = self._bucket_bytes or min(max(longest // buckets, least), most)
        count = max(1, -(-longest // limit))
        return [list(chunk.tensor_split(count)) for chunk in flat.tensor_split(self.size)]

    def _work(self, buffer: Tensor, residual: Tensor | None = None) -> _Work:
        kept = residual is not None and self._codec is not None
        return _Work(chunks=self._buckets(buffer), lost=self._buckets(residual) if kept else None)

    def _payload(self, work: _Work, chunk: int, bucket: int) -> Tensor:
        """Return what leaves of a bucket."""
        values = work.chunks[chunk][bucket]
        if self._codec is None:
            return values
        lost = None if work.lost is None else work.lost[chunk][bucket]
        return self._codec.encode(values, plus=work.arrived.pop((chunk, bucket), None), lost=lost)

    def _room(self, target: Tensor) -> Tensor:
        """Return memory for what comes in place of `target`."""
        if self._codec is None:
            return torch.empty_like(target)
        return target.new_empty(self._codec.bytes_of(target.numel()), dtype=torch.uint8)

    def _add(self, work: _Work, chunk: int, bucket: int, arrived: Tensor) -> None:
        """Add what came to a bucket; what is compressed, when the bucket leaves, in the same pass."""
        if self._codec is None:
            work.chunks[chunk][bucket].add_(arrived)
        else:
            work.arrived[chunk, bucket] = arrived

    def _keep(self, target: Tensor, payload: Tensor) -> None:
        if self._codec is not None:
            self._codec.decode_into(target, payload)
