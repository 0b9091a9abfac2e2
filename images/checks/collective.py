"""Two ranks exchange numbers: each on a GPU of its own where there are two, else on the processor."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from device import device_count, named

NEEDS = ("torch",)
RANKS = 2
LENGTH = 1 << 20


def main() -> None:
    # Two ranks of NCCL or RCCL cannot share a device.
    backend = "nccl" if device_count() >= RANKS else "gloo"
    # Ranks of one machine need no name of a network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(backend, f"file://{Path(folder, 'meeting')}"), nprocs=RANKS)


def rank_main(rank: int, backend: str, meeting: str) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=RANKS)
    own = torch.arange(LENGTH, dtype=torch.float32, device=device) * (rank + 1)
    total = own.clone()
    dist.all_reduce(total)
    parts = [torch.empty_like(own) for _ in range(RANKS)]
    dist.all_gather(parts, own)
    right = torch.equal(total, sum(parts)) and all(
        torch.equal(part, parts[0] * (number + 1)) for number, part in enumerate(parts)
    )
    if rank == 0:
        version = f" {torch.cuda.nccl.version()}" if backend == "nccl" else ""
        print(f"{backend}{version}, {RANKS} ranks on {named(device)}: {LENGTH} numbers reduced and gathered")
    dist.destroy_process_group()
    if not right:
        raise SystemExit(f"rank {rank}: the numbers are wrong")


if __name__ == "__main__":
    main()
