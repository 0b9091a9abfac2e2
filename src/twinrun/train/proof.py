"""The ranks of a proof: they time one all-reduce."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from twinrun.protocol.job import Job, ProofResult
from twinrun.train import device as devices
from twinrun.train import rank, ranks

_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
_REPEATS = 5


def prove(job: Job) -> ProofResult:
    """Return the shortest of several all-reduces of a message that is long for the network."""
    device = devices.device_of(job)
    ranks.join(job)
    size = _BYTES[device.type]
    message = torch.zeros(size // 4, device=device)
    found = []
    for _ in range(_REPEATS + 1):
        rank.beat("all-reduce")
        ranks.wait()
        devices.synchronise(device)
        began = time.perf_counter()
        dist.all_reduce(message)
        devices.synchronise(device)
        found.append(time.perf_counter() - began)
    slowest = ranks.largest([min(found[1:])], device)[0]
    return ProofResult(
        point=job.point,
        device_name=devices.name(device),
        libraries={"torch": torch.__version__},
        message_bytes=size,
        seconds=slowest,
        ranks=job.world_size,
    )


if __name__ == "__main__":
    rank.run(prove, Job)
