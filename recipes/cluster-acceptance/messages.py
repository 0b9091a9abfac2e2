"""Messages and collectives: what arrives must be what was sent."""

from __future__ import annotations

from typing import Any

from peers import exchange, gathered, host, join

from twinrun.protocol.checks import ChecksJob
from twinrun.train.checks import CheckError

SIZES = (1, 17, 4096, 100_003)
NETWORK = "see the kernel's log and the counters of the interface"
EXCLUDE = "exclude the node, then test its memory and links"


def rank_communication(job: ChecksJob) -> None:
    """Send a message of every size around the ring of ranks."""
    import torch  # noqa: PLC0415 - only in the check's own process
    import torch.distributed as dist  # noqa: PLC0415

    device = join(job)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, preceding = (rank + 1) % ranks, (rank - 1) % ranks
    spoilt = []
    for size in SIZES if ranks > 1 else ():
        arrived = torch.zeros(size, dtype=torch.int64, device=device)
        sent = message(rank, size).to(device)
        exchange(sent, following, arrived, preceding)
        if not torch.equal(arrived.cpu(), pattern(preceding, size)):
            spoilt.append(size)
    answers = gathered([host(), spoilt], device)
    bad = [(place, sizes) for place, (_, sizes) in enumerate(answers) if sizes]
    if bad:
        senders = [answers[(place - 1) % ranks][0] for place, _ in bad]
        shown = ", ".join(
            f"rank {(place - 1) % ranks} to {place} at {sizes} elements" for place, sizes in bad
        )
        raise CheckError(f"messages arrive changed: {shown}", remedy=NETWORK, nodes=senders)


def collective_function(job: ChecksJob) -> None:
    """Hold sums, copies and gathered parts of integers against the exact ones."""
    import torch  # noqa: PLC0415 - only in the check's own process
    import torch.distributed as dist  # noqa: PLC0415

    device = join(job)
    size, wrong, culprits = dist.get_world_size(), [], set[int]()
    for dtype in (torch.int32, torch.int64, torch.float32):
        for count in SIZES:
            own = message(dist.get_rank(), count).to(device=device, dtype=dtype)
            parts = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(parts, own)
            expected = [pattern(rank, count).to(device=device, dtype=dtype) for rank in range(size)]
            culprits |= {rank for rank in range(size) if not torch.equal(parts[rank], expected[rank])}
            dist.all_reduce(own)
            copied = expected[0].clone() if dist.get_rank() == 0 else torch.empty_like(own)
            dist.broadcast(copied, 0)
            exact: Any = sum(expected)
            for name, good in (
                ("all-reduce", torch.equal(own, exact)),
                ("broadcast", torch.equal(copied, expected[0])),
            ):
                if not good:
                    wrong.append(f"{name} of {count} {dtype}")
    answers = gathered([host(), wrong[:3]], device)
    if any(found for _, found in answers) or culprits:
        ranks = sorted(culprits) or [rank for rank, (_, found) in enumerate(answers) if found]
        nodes = list(dict.fromkeys(answers[rank][0] for rank in ranks))
        first = next((found[0] for _, found in answers if found), "all-gather")
        raise CheckError(
            f"{first} is not exact; wrong at rank {', '.join(map(str, ranks))}", remedy=EXCLUDE, nodes=nodes
        )


def pattern(rank: int, count: int) -> Any:
    """Return the integers of a rank, whose sum over many ranks is exact in fp32."""
    import torch  # noqa: PLC0415 - only in the check's own process

    return (torch.arange(count) * 31 + rank * 7) % 1009


def message(rank: int, count: int) -> Any:
    """Return what a rank sends to another, or gives to a collective."""
    return pattern(rank, count)
