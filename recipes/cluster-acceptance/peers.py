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
# However much peers differ, a node below a fifth of what they reach is slow.
MOST_SHARE = 0.8
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


def slow(samples: Mapping[str, Sequence[float]], *, share: float = LEAST_SHARE) -> dict[str, float]:
    """Return the best of each node that even so is below what its peers reach while they are disturbed.

    Args:
        samples: of each node, measured in turns: other work on a node widens what it reaches, and what that
            explains is no fault. A peer counts by its lower quartile, and peers by their median.
        share: of the peers' median, by which alike nodes may differ; more where there are few.
    """
    usual = {name: sorted(values)[len(values) // 4] for name, values in samples.items()}
    found = {}
    for name, values in samples.items():
        # Of the others: a slow node among few would widen its own allowance.
        peers = [value for peer, value in usual.items() if peer != name]
        median = statistics.median(peers)
        deviation = NORMAL * statistics.median(abs(value - median) for value in peers)
        allowed = max(share, FEW_SHARE) if len(peers) <= FEW_PEERS else share
        allowed = min(max(DEVIATIONS * deviation, allowed * median), MOST_SHARE * median)
        if max(values) < median - allowed:
            found[name] = max(values)
    return found


def demand_peers(samples: Mapping[str, Sequence[float]], what: str) -> None:
    """Raise UndecidedError where there are too few nodes to compare; what was measured is said."""
    if len(samples) < LEAST_NODES:
        measured = ", ".join(f"{name} {max(values):.4g}" for name, values in samples.items()) or "none"
        raise UndecidedError(
            f"{len(samples)} of the {LEAST_NODES} nodes that a comparison needs; {what}: {measured}",
            remedy=f"run it on {LEAST_NODES} nodes or more, or judge the number by the link's data sheet",
        )
