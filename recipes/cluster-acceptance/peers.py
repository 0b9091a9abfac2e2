"""What ranks tell each other in a check, and which nodes are unlike their peers."""

from __future__ import annotations

import json
import platform
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from twinrun.protocol.checks import ChecksJob
from twinrun.train.checks import UndecidedError

LEAST_NODES = 3
# Deviations from the median that pass; for normal samples 1.4826 x MAD is a standard deviation.
DEVIATIONS = 5
NORMAL = 1.4826
# Nodes that are all alike have a MAD near 0: what differs by no more than this share is alike too.
LEAST_SHARE = 0.15
# Two peers say little about how much alike nodes differ.
FEW_PEERS, FEW_SHARE = 2, 0.5
TEXT_BYTES = 4096


def host() -> str:
    """Return this node's name."""
    return platform.node()


def join(job: ChecksJob) -> Any:
    """Join the other ranks and return this rank's device."""
    from twinrun.train import ranks  # noqa: PLC0415 - only in the check's own process
    from twinrun.train.device import device_of  # noqa: PLC0415

    device = device_of(job)
    ranks.join(job, alone=True)
    return device


def exchange(sent: Any, to: int, arrived: Any, of: int) -> None:
    """Send a message to one rank and receive one of another at the same time."""
    import torch.distributed as dist  # noqa: PLC0415 - only in the check's own process

    both = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, arrived, of)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def gathered(value: Any, device: Any) -> list[Any]:
    """Return what every rank tells, in the order of ranks, as JSON."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    text = json.dumps(value).encode()
    if len(text) > TEXT_BYTES:
        raise ValueError(f"{len(text)} bytes to tell, at most {TEXT_BYTES}")
    own = torch.tensor(list(text.ljust(TEXT_BYTES)), dtype=torch.uint8, device=device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [json.loads(bytes(part.cpu().tolist())) for part in parts]


def unlike(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return by name what differs from what most have."""
    counts = Counter(json.dumps(value) for value in values.values())
    usual = counts.most_common(1)[0][0]
    return {name: value for name, value in values.items() if json.dumps(value) != usual}


def slow(values: Mapping[str, float], *, share: float = LEAST_SHARE) -> dict[str, float]:
    """Return the nodes whose value is below those of their peers, by the median absolute deviation.

    Args:
        share: of the peers' median, by which alike nodes may differ; more where there are few.
    """
    return {
        name: value
        for name, value in values.items()
        # Of the others: a slow node among few would widen its own allowance.
        if value < _least([other for peer, other in values.items() if peer != name], share)
    }


def _least(peers: Sequence[float], share: float) -> float:
    median = statistics.median(peers)
    deviation = NORMAL * statistics.median(abs(value - median) for value in peers)
    allowed = max(share, FEW_SHARE) if len(peers) <= FEW_PEERS else share
    return median - max(DEVIATIONS * deviation, allowed * median)


def demand_peers(values: Mapping[str, float], what: str) -> None:
    """Raise UndecidedError where there are too few nodes to compare; what was measured is said."""
    if len(values) < LEAST_NODES:
        measured = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        raise UndecidedError(
            f"{len(values)} of the {LEAST_NODES} nodes that a comparison needs; {what}: {measured or 'none'}",
            remedy=f"run it on {LEAST_NODES} nodes or more, or judge the number by the link's data sheet",
        )
