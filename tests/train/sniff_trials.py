"""Trials of the sniff test on the devices of this machine, under torchrun, with two numbers of runs.

Writes false alarms of clean runs, and how often a rank with a tenth more work is named.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from twinrun.protocol.job import Job
from twinrun.protocol.signals import SNIFFS, Sniff, alarms
from twinrun.train import rank
from twinrun.train.sniff import Sniffer

SLOW, TIMES = 2, 8


class SlowSniffer(Sniffer):
    """A rank that multiplies a tenth more."""

    def _multiply(self) -> None:
        super()._multiply()
        for _ in range(max(1, self._products // 10)):
            torch.matmul(self._matrix, self._matrix, out=self._product)


def named(job: Job, device: torch.device, *, slow: bool) -> set[tuple[int, str]]:
    """Return the ranks that a run of sniffs names, and the share of time that they took."""
    file = Path(job.out) / SNIFFS
    file.unlink(missing_ok=True)
    sniffer = (SlowSniffer if slow and rank.number() == SLOW else Sniffer)(job, device)
    for step in range(1, TIMES + 1):
        sniffer.after_step(step)
    if rank.number():
        return set()
    sniffs = [Sniff.model_validate_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
    COST.extend(one.seconds for one in sniffs)
    found = [alarms(sniffs[:end]) for end in range(1, len(sniffs) + 1)]
    return {(one.rank, one.kind) for each in found for one in each}


COST: list[float] = []


def main(clean: int, slow: int) -> None:
    """Run the trials and print what they found."""
    accelerator = torch.cuda.is_available()
    device = torch.device("cuda", rank.number()) if accelerator else torch.device("cpu")
    if accelerator:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if accelerator else "gloo")
    world = dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            recipe="r",
            point="p",
            metrics="",
            attempt="",
            out=folder,
            world_size=world,
            accelerator=accelerator,
            sniff_steps=1,
        )
        false = [found for _ in range(clean) if (found := named(job, device, slow=False))]
        right = sum(named(job, device, slow=True) == {(SLOW, "compute")} for _ in range(slow))
    if not rank.number():
        cost = sorted(COST)[len(COST) // 2]
        sys.stdout.write(f"{world} ranks, {cost:.4f} s a sniff: {len(false)} alarms in {clean} clean runs, ")
        sys.stdout.write(f"{right} of {slow} slow ranks named; {false}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
