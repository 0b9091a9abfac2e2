"""One case of attention: random inputs, the float64 reference of some heads, least work, and calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twinrun.protocol.bench import COPY, Work
from twinrun.train.bench import Session
from twinrun.train.measure import distance, poisoned

if not torch.cuda.is_available():
    # Triton reads it when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from twinrun_attention.reference import reference_attention

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
MASKS = ("full", "causal", "window", "alibi")
PHASES = ("forward", "backward", "decode")
# Heads of keys that are compared in each case, chosen anew each run.
CHECKED_HEADS = 2

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes queries, keys and values (batch, row, head, column) and returns the output likewise."""


class AttentionCase:
    """(batch, heads, length, head size) with a mask; in decoding one query a sequence meets `length` keys."""

    def __init__(self, session: Session, settings: dict[str, Any], *, dtype: str, mask: str) -> None:
        self.dtype, self.mask, self.phases = dtype, mask, tuple(settings["phases"])
        self.batch, self.heads, self.length = settings["batch"], settings["heads"], settings["length"]
        self.kv_heads, self.head_size = settings["kv_heads"] or self.heads, settings["head_size"]
        self.window, self.flex = settings["window"], bool(settings["flex"])
        rows = 1 if self.phases == ("decode",) else self.length
        queries, keys = (rows, self.heads), (self.length, self.kv_heads)
        on = {"dtype": DTYPES[dtype], "device": session.device, "generator": session.generator}
        self.q, self.k, self.v, self.gradient = (
            torch.randn((self.batch, *one, self.head_size), **on) for one in (queries, keys, keys, queries)
        )
        self.chosen = self._choose(session)
        self._expected = [self._exact(*one) for one in self.chosen]

    @property
    def causal(self) -> bool:
        """Whether a query sees no later keys."""
        return self.mask != "full"

    @property
    def slopes(self) -> Tensor | None:
        """Slopes of ALiBi, one a head, the steepest first; None where the mask has none."""
        if self.mask != "alibi":
            return None
        steps = torch.arange(1, self.heads + 1, device=self.q.device)
        return torch.exp2(-8.0 * steps / self.heads)

    @property
    def left(self) -> int:
        """How many keys before its own a query sees; -1 is no limit."""
        return self.window - 1 if self.mask == "window" else -1

    def labels(self, phase: str) -> dict[str, str]:
        """Return the labels of a call."""
        shared = "equal" if self.kv_heads == self.heads else "grouped"
        size = f"d{self.head_size}"
        return {"phase": phase, "dtype": self.dtype, "mask": self.mask, "heads": shared, "size": size}

    def work(self, phase: str) -> Work:
        """Return the least work: two products forward, five backward of the scores seen; bytes to decode."""
        formula = f"attention-{phase}/4BHLLd"
        if phase == "decode":
            moved = self.k.nbytes + self.v.nbytes + 2 * self.q.nbytes
            return Work(formula="attention-decode/cache", amounts={COPY: moved})
        seen = self.length**2 * (0.5 if self.causal else 1.0)
        if self.mask == "window":
            width = min(self.window, self.length)
            seen = self.length * width - width**2 / 2
        flops = 4.0 * self.batch * self.heads * seen * self.head_size * (2.5 if phase == "backward" else 1.0)
        return Work(formula=formula, amounts={f"{self.dtype}-products": flops})

    def errors(self, function: Function) -> dict[str, dict[str, float]]:
        """Return by phase how far an implementation is from the reference, in memory that was poisoned."""
        trained, inputs = "decode" not in self.phases, (self.q, self.k, self.v)
        leaves = [one.detach().requires_grad_(trained) for one in inputs]
        with poisoned():
            out = function(*leaves)
            gradients = torch.autograd.grad(out, leaves, self.gradient) if out.requires_grad else ()
        names = ("out", "q", "k", "v")
        found = dict(zip(names, (out.detach(), *gradients), strict=False))
        errors = {name: self._error(name, tensor) for name, tensor in found.items()}
        backward = {name: error for name, error in errors.items() if name != "out"}
        out_only = {"out": errors["out"]}
        return {"forward": out_only, "decode": out_only, "backward": backward}

    def reference(self, q: Tensor, k: Tensor, v: Tensor, heads: slice = slice(None)) -> Tensor:
        """Return attention of `heads` in plain torch, in the type of the inputs."""
        slopes, right = None if self.slopes is None else self.slopes[heads], 0 if self.causal else -1
        scale = self.head_size**-0.5
        return reference_attention(q, k, v, scale=scale, left=self.left, right=right, slopes=slopes)

    def call(self, function: Function, phase: str) -> Callable[[], object]:
        """Return what is timed: a call that keeps what training keeps, or the gradients of one."""
        if phase == "decode":
            return torch.no_grad()(lambda: function(self.q, self.k, self.v))
        leaves = [one.detach().requires_grad_() for one in (self.q, self.k, self.v)]
        if phase == "forward":
            return lambda: function(*leaves)
        out = function(*leaves)
        return lambda: torch.autograd.grad(out, leaves, self.gradient, retain_graph=True)

    def _choose(self, session: Session) -> list[tuple[int, int]]:
        """Return sequences and heads of keys to compare."""
        on = {"generator": session.generator, "device": session.device}
        picked = torch.randperm(self.batch * self.kv_heads, **on)[:CHECKED_HEADS].tolist()
        return [divmod(one, self.kv_heads) for one in picked]

    def _exact(self, sequence: int, kv_head: int) -> dict[str, Tensor]:
        """Return output and gradients of a head of keys in float64, from the inputs as they were rounded."""
        group, outs, of_queries = self.heads // self.kv_heads, [], []
        k, v = (one[sequence, None, :, kv_head, None].double().requires_grad_() for one in (self.k, self.v))
        for head in range(kv_head * group, (kv_head + 1) * group):
            q = self.q[sequence, None, :, head, None].double().requires_grad_()
            out = self.reference(q, k, v, heads=slice(head, head + 1))
            out.backward(self.gradient[sequence, None, :, head, None].double())
            outs.append(out.detach())
            of_queries.append(q.grad)
        return {"out": torch.cat(outs, 2), "q": torch.cat(of_queries, 2), "k": k.grad, "v": v.grad}

    def _error(self, name: str, tensor: Tensor) -> float:
        group = self.heads // self.kv_heads if name in {"out", "q"} else 1
        found = [tensor[row, None, :, head * group : (head + 1) * group] for row, head in self.chosen]
        return distance(torch.cat(found), torch.cat([one[name] for one in self._expected]))
