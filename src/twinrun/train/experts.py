"""Experts: a router sends each token to one of several layers, and none is ever dropped.

As the layers of Switch Transformers (Fedus et al. 2021, arXiv:2101.03961), without their auxiliary loss.
Shape suffixes: B sequences, S tokens of one, D width, N = B * S tokens, X experts, M tokens of one expert.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Experts(nn.Module):
    """A layer of each token's own: the expert that its router likes best, times how much."""

    def __init__(self, width: int, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.router = nn.Linear(width, len(self.experts), bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_ND = x_BSD.flatten(0, 1)
        shares_NX = torch.softmax(linear(x_ND.float(), self.router.weight.float()), dim=1)
        share_N, chosen_N = shares_NX.max(dim=1)
        y_ND = torch.zeros_like(x_ND)
        for number, expert in enumerate(self.experts):
            # An expert that no token was sent to still takes part, with nothing: its gradient is zero.
            rows_M = (chosen_N == number).nonzero()[:, 0]
            y_MD = expert(x_ND[rows_M]) * share_N[rows_M, None].to(x_ND.dtype)
            y_ND = y_ND.index_add(0, rows_M, y_MD)
        return y_ND.view_as(x_BSD)
