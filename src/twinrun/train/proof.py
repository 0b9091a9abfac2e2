"""The ranks of a proof: they time one all-reduce, and stay until they are killed.

What still writes its pulse after the job was cancelled has outlived it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from twinrun.protocol.job import Job, ProofResult
from twinrun.train import device as devices
from twinrun.train import rank, ranks

_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
_REPEATS, _STAY_SECONDS = 5, 600
# Before the rank binds itself to the cores beside its device.
_CORES = len(os.sched_getaffinity(0))


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
        # One rank without a GPU has nobody to meet.
        if dist.is_initialized():
            dist.all_reduce(message)
        devices.synchronise(device)
        found.append(time.perf_counter() - began)
    slowest = ranks.largest([min(found[1:])], device)[0]
    result = ProofResult(
        point=job.point,
        device_name=devices.name(device),
        libraries={"torch": torch.__version__},
        message_bytes=size,
        seconds=slowest,
        ranks=job.world_size,
        cores=_CORES,
        memory_bytes=_memory(),
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank.number() == 0:
        rank.write_result(job, result)
    rank.beat("stays")
    time.sleep(_STAY_SECONDS)
    return result


def _memory() -> int:
    """Return the least of the machine's memory and the limits of the control groups around this process."""
    group = Path("/proc/self/cgroup").read_text(encoding="utf-8").strip().rpartition("::")[2]
    own = Path("/sys/fs/cgroup") / group.lstrip("/")
    files = [one / "memory.max" for one in (own, *own.parents)]
    limits = [one.read_text(encoding="ascii").strip() for one in files if one.is_file()]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(int(one) for one in limits if one != "max")])


if __name__ == "__main__":
    rank.run(prove, Job)
