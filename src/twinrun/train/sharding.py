"""When FSDP2 communicates, and what its collectives get wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twinrun.protocol.training import TrainingJob
from twinrun.train.models import DTYPES, Model


def shard(model: Model, job: TrainingJob) -> None:
    """Let FSDP2 split each block and the rest of a model over the ranks; blocks are compiled before."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = DTYPES[job.training.precision]
    every = job.training.reduction == "microbatch"
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype if every else torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy, reshard_after_forward=every)


class GradientSync:
    """Lets FSDP2 gather parameters before a step's first microbatch and reduce gradients after its last."""

    def __init__(self, model: nn.Module, *, microbatches: int) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._microbatches = microbatches
        self._done = 0

    def before_forward(self) -> None:
        """Prepare the next microbatch."""
        self._done += 1
        last = self._done % self._microbatches == 0
        for module in self._sharded:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)
            module.set_is_last_backward(last)


def gradient_excess(device: torch.device) -> float:
    """Return how many times too large FSDP2 makes a mean gradient: 1, or the number of ranks.

    FSDP2 asks for ReduceOp.AVG, which Gloo's reduce-scatter silently takes for a sum
    (github:pytorch/pytorch#162338); AdamW hides it until gradients are clipped. Measured on a
    layer of one weight, since a later PyTorch may mend either side.
    """
    from torch.distributed.fsdp import fully_shard

    probe = fully_shard(nn.Linear(1, 1, bias=False, device=device))
    probe(torch.ones(1, 1, device=device)).sum().backward()
    excess: float = probe.weight.grad.full_tensor().item()
    return excess


def settle_buckets(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Let DDP see one backward pass of `loss`, of any data, before a resumed run goes on.

    After its first pass DDP sorts gradients into other buckets, which all-reduce then sums in another order:
    without this pass the first resumed step would be rounded as only the first step of a run is.
    """
    loss.backward()
    optimizer.zero_grad(set_to_none=True)
