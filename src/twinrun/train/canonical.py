"""Gradients summed in one fixed tree over the microbatches of a step: the same bits on 1, 2, 4, ... ranks.

What it costs: every rank has the whole model and optimizer, keeps up to log2(microbatches) + 1 sums of
gradients, sends all gradients log2(ranks) times instead of twice, and on a CPU computes on one thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinrun.foundation.errors import InputError
from twinrun.protocol.training import TrainingJob
from twinrun.train import ranks
from twinrun.train.data import Batch


class CanonicalGradients:
    """Sums the gradients of steps in a tree that depends on the global batch and the microbatch alone."""

    def __init__(self, model: nn.Module, job: TrainingJob, *, loss_of: Callable[[Tensor], Tensor]) -> None:
        """Take a whole model, the same on every rank.

        Raises:
            InputError: the ranks, or the microbatches of a step, are no power of two.
        """
        self._parameters = list(model.parameters())
        self._job, self._loss_of = job, loss_of
        self._leaves = job.training.global_batch // job.microbatch
        for place, count in (("devices", job.world_size), ("microbatch", self._leaves)):
            if count & (count - 1) or self._leaves % job.world_size:
                raise InputError(
                    "a tree of sums needs powers of two",
                    place=f"--set {place}",
                    found=f"{job.world_size} ranks, {self._leaves} microbatches in a step",
                    allowed="1, 2, 4, ... of both, as many microbatches as ranks or more",
                )
        if not job.accelerator:
            # Threads split sums by their number, and ranks of one machine have other numbers of them.
            torch.set_num_threads(1)

    def of_step(self, batch: Batch) -> Tensor:
        """Leave the mean gradients of a global batch in the parameters; return its mean loss."""
        tokens_BS = self._share(batch)
        sums: list[tuple[int, Tensor]] = []
        for micro_BS in tokens_BS.split(self._job.microbatch):
            level, total = 0, self._leaf(micro_BS)
            while sums and sums[-1][0] == level:
                total = sums.pop()[1] + total
                level += 1
            sums.append((level, total))
        ((_, total),) = sums
        return self._spread(self._over_ranks(total))

    def _share(self, batch: Batch) -> Tensor:
        """Return this rank's samples of the global batch in the order of their hashes.

        Which rank has read which sample depends on how many there are; which one computes it must not.
        """
        tokens_BS, hashes_B = batch["tokens"], batch["hashes"]
        if self._job.world_size > 1:
            tokens_BS, hashes_B = _gathered(tokens_BS), _gathered(hashes_B)
        ordered_BS = tokens_BS[hashes_B.argsort(stable=True)]
        return ordered_BS.chunk(self._job.world_size)[ranks.rank()]

    def _leaf(self, tokens_BS: Tensor) -> Tensor:
        """Return gradients and loss of a microbatch as one vector."""
        loss = self._loss_of(tokens_BS)
        found = torch.autograd.grad(loss, self._parameters)
        return torch.cat([*(one.flatten() for one in found), loss.detach().to(found[0].dtype).view(1)])

    def _over_ranks(self, total: Tensor) -> Tensor:
        """Go on with the tree: neighbours, then pairs of neighbours, until every rank has the root."""
        bit = 1
        while bit < self._job.world_size:
            theirs, peer = torch.empty_like(total), ranks.rank() ^ bit
            exchange = [dist.P2POp(dist.isend, total, peer), dist.P2POp(dist.irecv, theirs, peer)]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            # The order of two addends leaves the sum as it is.
            total = total + theirs
            bit *= 2
        return total

    def _spread(self, total: Tensor) -> Tensor:
        mean = total / self._leaves
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, mean[:-1].split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)
        return mean[-1]


def _gathered(part: Tensor) -> Tensor:
    every = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(every, part.contiguous())
    return torch.cat(every)
