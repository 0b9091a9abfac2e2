"""What one rank of the tests of collectives does; run by torchrun, prints nothing when all is right."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from algorithms import naive, two_level
from compression import CODECS
from links import Links
from ring import Ring
from torch import Tensor

from twinrun.train import rank as process

LENGTHS = (0, 1, 2, 5, 97, 1031)
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.int64)
# A few elements, so that every buffer has many buckets.
SMALL = 64


def drawn(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return values whose sum over a few ranks is exact in every type."""
    generator = torch.Generator().manual_seed(100 * count + rank)
    return torch.randint(-15, 16, (count,), generator=generator).to(dtype)


def normal(rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def algorithms(links: Links) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
    yield "ring", Ring(links).all_reduce
    yield "ring in buckets", Ring(links, bucket_bytes=SMALL).all_reduce
    yield "ring without overlap", Ring(links, bucket_bytes=SMALL, in_flight=1).all_reduce
    yield "ring with all in flight", Ring(links, bucket_bytes=SMALL, in_flight=1000).all_reduce
    yield "naive", naive(links, bucket_bytes=SMALL)
    for ranks_per_node in range(1, links.size + 1):
        if links.size % ranks_per_node == 0:
            reduce = two_level(links, ranks_per_node=ranks_per_node, bucket_bytes=SMALL)
            yield f"two-level {ranks_per_node}", reduce


def sums_are_exact(links: Links) -> None:
    for name, reduce in algorithms(links):
        for dtype in DTYPES:
            for count in LENGTHS:
                found = drawn(links.rank, count, dtype)
                reduce(found)
                expected = sum(drawn(rank, count, dtype) for rank in range(links.size))
                assert torch.equal(found, torch.as_tensor(expected)), (name, dtype, count)


def links_carry_what_the_formula_says(links: Links) -> None:
    count, n = 12 * 64, links.size
    for name, reduce in algorithms(links):
        links.reset()
        reduce(drawn(links.rank, count, torch.float32))
        formulas = {"naive": n - 1, "ring": 2 * (n - 1) / n}
        if (shares := formulas.get(name.partition(" ")[0])) is not None:
            assert links.busiest_bytes(torch.device("cpu")) == shares * 4 * count, (name, links.sent_bytes)


def compression_is_close_and_equal_on_all_ranks(links: Links) -> None:
    allowed = {"bf16": 1e-2, "fp8": 1e-1, "int8": 2e-2}
    for name, codec in CODECS.items():
        for count in (0, 1, 97, 5000):
            parts = [normal(rank, count) for rank in range(links.size)]
            found = parts[links.rank].clone()
            links.reset()
            Ring(links, codec=codec(), bucket_bytes=4096).all_reduce(found)
            exact = sum(part.double() for part in parts)
            apart = torch.linalg.vector_norm(found - exact) / max(torch.linalg.vector_norm(exact), 1e-9)
            assert apart <= allowed[name], (name, count, apart)
            if count == 5000 and links.size > 1:
                assert links.sent_bytes < 0.6 * 4 * count * 2 * (links.size - 1) / links.size
            others = [torch.empty_like(found) for _ in range(links.size)]
            if links.size > 1:
                dist.all_gather(others, found)
                assert all(torch.equal(one, found) for one in others), name


def feedback_gives_back_what_was_lost(links: Links) -> None:
    """The mean of T sums of one gradient is nearer to the exact one the larger T is."""
    own = normal(links.rank, 3000)
    exact = sum(normal(rank, 3000).double() for rank in range(links.size))
    for name in ("fp8", "int8"):
        reducer, residual, total = Ring(links, codec=CODECS[name]()), torch.zeros(3000), torch.zeros(3000)
        apart = []
        for turn in range(1, 33):
            found = own.clone()
            reducer.all_reduce(found, residual=residual)
            total += found
            apart.append(float(torch.linalg.vector_norm(total / turn - exact)))
        assert links.size == 1 or apart[-1] < apart[0] / 8, (name, apart)


def what_is_no_number_stays_none(links: Links) -> None:
    for bad in (torch.nan, torch.inf):
        for codec in CODECS.values():
            found = torch.ones(600)
            found[300] = bad if links.rank == 0 else 1.0
            Ring(links, codec=codec()).all_reduce(found)
            assert not torch.isfinite(found[300])


CASES = (
    sums_are_exact,
    links_carry_what_the_formula_says,
    compression_is_close_and_equal_on_all_ranks,
    feedback_gives_back_what_was_lost,
    what_is_no_number_stays_none,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] != "1":
        dist.init_process_group("gloo")
    for case in CASES:
        case(Links())
    process.end()
