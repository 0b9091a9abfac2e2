"""The sniff test of a rank between two steps: a matrix product, an all-reduce, exchanges with others."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twinrun.protocol.job import Job
from twinrun.protocol.signals import SNIFFS, Sniff
from twinrun.train import rank
from twinrun.train.device import synchronise

# Of the matrix product, on a processor and on a GPU; of exchanged and reduced messages in floats.
_SIDE = {"cpu": 512, "cuda": 4096}
_WORDS = {"cpu": 1 << 16, "cuda": 1 << 22}
# As many in one timing: of single products of 0.2 ms on H200s, the host's jitter was a tenth.
_PRODUCTS = {"cpu": 1, "cuda": 20}
_MESSAGES = 8
_REPEATS = 3


class Sniffer:
    """Times the parts of a sniff on this rank; the first rank writes what all ranks measured.

    It does nothing for a single rank, and for a job that asks for none.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        self._device = device
        self._products = _PRODUCTS[device.type]
        self._every = job.sniff_steps if job.world_size > 1 else 0
        if not self._every:
            return
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        side, words = _SIDE[device.type], _WORDS[device.type]
        self._matrix = torch.ones(side, side, dtype=kind, device=device)
        self._product = torch.empty_like(self._matrix)
        self._sent, self._heard = torch.ones(words, device=device), torch.empty(words, device=device)

    def after_step(self, step: int) -> None:
        """Sniff where it is due; all ranks call this after the same step."""
        if not self._every or step % self._every:
            return
        rank.beat("sniff test")
        began = time.perf_counter()
        compute = self._shortest(self._multiply)
        reduced = self._shortest(lambda: dist.all_reduce(self._sent.fill_(1.0)), repeats=2)
        exchange = min((self._exchange(stride) for stride in _strides(self._job.world_size)), default=0.0)
        own = torch.tensor([compute, exchange], dtype=torch.float64, device=self._device)
        every = [torch.empty_like(own) for _ in range(self._job.world_size)]
        dist.all_gather(every, own)
        if rank.number() == 0:
            computes, exchanges = zip(*[one.tolist() for one in every], strict=True)
            found: Any = {"compute": computes, "exchange": exchanges, "reduce": reduced}
            sniff = Sniff(step=step, seconds=time.perf_counter() - began, **found)
            with (Path(self._job.out) / SNIFFS).open("a", encoding="utf-8") as stream:
                stream.write(sniff.model_dump_json() + "\n")

    def _multiply(self) -> None:
        for _ in range(self._products):
            torch.matmul(self._matrix, self._matrix, out=self._product)

    def _exchange(self, stride: int) -> float:
        """Return the seconds of a message to the partner and back; infinite for a rank that has none."""
        partner = rank.number() ^ stride
        if partner >= self._job.world_size:
            return float("inf")
        return self._shortest(lambda: self._send(partner), repeats=2)

    def _send(self, partner: int) -> None:
        for _ in range(_MESSAGES):
            sent = dist.P2POp(dist.isend, self._sent, partner)
            heard = dist.P2POp(dist.irecv, self._heard, partner)
            for one in dist.batch_isend_irecv([sent, heard]):
                one.wait()

    def _shortest(self, work: Callable[[], Tensor | object], *, repeats: int = _REPEATS) -> float:
        """Return the shortest of several times, which what else runs on the machine disturbs least."""
        found = []
        work()
        for _ in range(repeats):
            synchronise(self._device)
            began = time.perf_counter()
            work()
            synchronise(self._device)
            found.append(time.perf_counter() - began)
        return min(found)


def _strides(world: int) -> tuple[int, ...]:
    """Return what partners differ by: powers of two, so that nobody is judged by one pair alone."""
    return tuple(1 << power for power in range(world.bit_length()) if 1 << power < world)
