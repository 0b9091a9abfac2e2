"""A decoder as a sequence of layers, and its matrices cut over tensor-parallel ranks.

Shape suffixes: B sequences, S tokens of one, D width, V vocabulary, K features of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from decoders import TensorCut, decoder_of
from torch import Tensor, nn
from torch.nn.functional import embedding

from twinrun.train.layers import Linear, head_loss, recomputed
from twinrun.train.models import Model


class Rows(nn.Module):
    """A matrix with a row for each token: the embedding, the head, or what is both."""

    def __init__(self, weight_VD: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight_VD

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return embedding(tokens_BS, self.weight)


class Head(Rows):
    """The rows of a head that is its own matrix; see `with_weight`."""

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        return with_weight(self, x_BSD)


class RecomputedBlock(nn.Module):
    """A block of which the input alone is kept for the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x_BSD: Tensor) -> Tensor:
        out: Tensor = recomputed(self.block, x_BSD)
        return out


def middle(model: Model, *, recompute: bool) -> list[nn.Module]:
    """Return the layers between embedding and head."""
    around = decoder_of(model)
    blocks = [RecomputedBlock(block) if recompute else block for block in model.blocks]
    return [around.entry, *blocks, around.norm]


def with_weight(rows: Rows, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `loss` needs: the last layer's output and the head's weights."""
    return x_BSD, rows.weight


def loss(outputs: tuple[Tensor, Tensor], targets_BS: Tensor) -> Tensor:
    """Return the mean cross entropy in fp32, nats per token."""
    x_BSD, weight_VD = outputs
    return head_loss(x_BSD, weight_VD, targets_BS)


class _ToRanks(torch.autograd.Function):
    """Gives every rank the same input; their gradients of it are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _FromRanks(torch.autograd.Function):
    """Sums the ranks' parts of an output; each has its gradient already."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ColumnParallelLinear(Linear):
    """An affine map of which this rank computes some of the features."""

    def __init__(self, weight_KD: Tensor, bias_K: Tensor | None, group: dist.ProcessGroup) -> None:
        super().__init__(weight_KD.shape[1], weight_KD.shape[0], bias=bias_K is not None, device="meta")
        self.weight = _cut(weight_KD)
        if bias_K is not None:
            self.bias = _cut(bias_K)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_ToRanks.apply(x, self.group))


class RowParallelLinear(nn.Module):
    """An affine map of which this rank sums over some of the features."""

    def __init__(self, weight_DK: Tensor, bias_D: nn.Parameter | None, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias = _cut(weight_DK), bias_D
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        part = x @ self.weight.to(x.dtype).T
        whole: Tensor = _FromRanks.apply(part, self.group)
        return whole if self.bias is None else whole + self.bias.to(x.dtype)


def split_tensors(model: Model, group: dist.ProcessGroup, *, rank: int) -> None:
    """Cut the matrices that a model names over `group`, whose member `rank` this is; norms stay whole."""
    size = dist.get_world_size(group)
    for block in model.blocks:
        for name, cut in decoder_of(model).cuts.items():
            owner, _, last = name.rpartition(".")
            whole = block.get_submodule(name)
            setattr(block.get_submodule(owner), last, _part(whole, cut, group, size=size, rank=rank))


def _part(whole: Any, cut: TensorCut, group: dist.ProcessGroup, *, size: int, rank: int) -> nn.Module:
    if cut.axis == "inner":
        return RowParallelLinear(whole.weight.chunk(size, dim=1)[rank], whole.bias, group)

    def mine(rows: Tensor) -> Tensor:
        return torch.cat([part.chunk(size)[rank] for part in rows.chunk(cut.parts)])

    return ColumnParallelLinear(mine(whole.weight), None if whole.bias is None else mine(whole.bias), group)


def _cut(part: Tensor) -> nn.Parameter:
    """Return a parameter that no other rank of the group has, which its gradient's norm heeds."""
    parameter = nn.Parameter(part.detach().clone())
    parameter.model_parallel = True
    return parameter
