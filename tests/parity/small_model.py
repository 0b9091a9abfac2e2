"""A small transformer in plain PyTorch, trained for some steps with one fault or none, and traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinrun.parity import Tracer, renumber

WIDTH, HEADS, LAYERS, TOKENS, SEQUENCE, BATCH, MICRO = 64, 4, 3, 97, 32, 8, 2
STEPS, FAULTY = 10, 4


class Attention(nn.Module):
    """Causal attention whose heads have weights of their own names, as torchtitan's and Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.offset = HEADS, 0
        self.half_scores = False
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(-1, -2) * (WIDTH / HEADS) ** -0.5
        if self.half_scores:
            scores = scores.bfloat16().float()
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril(self.offset)
        heads = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.wo(heads.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a gated layer of hidden features, each after a norm."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.attention, self.norm_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.drop(self.fc2(functional.gelu(self.fc1(self.norm_2(x)))))


class Model(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class PlantedFault(NamedTuple):
    """What is done to a run at a step, and at which layer a trace must name it."""

    name: str
    layer: str
    """Name of the layer; the first that a fault can show at."""
    values: Mapping[str, float] = {}
    """Attributes of modules from the faulty step on, by their names."""
    element: tuple[str, float] | None = None
    """Parameter, one element of which is more by a number."""
    skipped: int | None = None
    gradient: str = ""
    """Parameter that keeps no gradient in the faulty step."""
    seed: int = 0
    """Of dropout, from the faulty step on."""
    dropout: float = 0.0

    def plant(self, model: Model) -> None:
        for name, value in self.values.items():
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, value)
        if self.element:
            with torch.no_grad():
                model.get_parameter(self.element[0]).view(-1)[5] += self.element[1]


def _element(name: str, by: float) -> PlantedFault:
    return PlantedFault(f"one element of {name} + {by:g}", name.rpartition(".")[0], element=(name, by))


def _epsilon(name: str) -> PlantedFault:
    return PlantedFault(f"epsilon of {name}", name, {f"{name}.eps": 1e-4})


def _attention(block: int, what: str, **values: float) -> PlantedFault:
    place = f"blocks.{block}.attention"
    named = {f"{place}.{name}": value for name, value in values.items()}
    return PlantedFault(f"{what} of block {block}", f"{place}.wo", named)


def _no_gradient(name: str) -> PlantedFault:
    return PlantedFault(f"no gradient of {name}", name.rpartition(".")[0], gradient=name)


FAULTS = (
    _element("embedding.weight", 0.01),
    _element("blocks.0.fc1.weight", 0.01),
    _element("blocks.1.attention.wv.weight", 0.003),
    _element("blocks.2.fc2.bias", 0.003),
    _element("head.weight", 0.001),
    PlantedFault("first microbatch skipped", "embedding", skipped=0),
    PlantedFault("last microbatch skipped", "embedding", skipped=3),
    _attention(0, "mask off by 1", offset=1),
    _attention(1, "mask off by 1", offset=1),
    _attention(2, "mask off by -1", offset=-1),
    _epsilon("blocks.0.norm_1"),
    _epsilon("blocks.1.norm_2"),
    _epsilon("norm"),
    _no_gradient("blocks.0.fc1.bias"),
    _no_gradient("blocks.1.norm_1.bias"),
    _no_gradient("blocks.2.attention.wq.bias"),
    _attention(0, "scores in bf16", half_scores=True),
    _attention(2, "scores in bf16", half_scores=True),
    PlantedFault("another seed of dropout", "blocks.0", seed=1, dropout=0.1),
    PlantedFault("another seed of dropout later", "blocks.0", seed=2, dropout=0.3),
)


def trained(
    path: Path, *, fault: PlantedFault | None = None, seed: int = 0, control: int = 0, dropout: float = 0.0
) -> None:
    """Train, and write the trace to `path`."""
    torch.manual_seed(seed)
    model = Model(dropout)
    data = torch.Generator().manual_seed(1000 + seed)
    # Masks of dropout are drawn for features and samples in their order: controls move hidden features alone.
    order = renumber(model, control, samples=not dropout) if control else None
    tracer = Tracer(model, path, order=order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, TOKENS, (BATCH, SEQUENCE), generator=data).cumsum(1) % TOKENS
        changed = fault is not None and step >= FAULTY
        torch.manual_seed(step + (7919 * fault.seed if fault and changed else 0))
        if fault and step == FAULTY:
            fault.plant(model)
        with tracer.step():
            for number, part in enumerate(tokens.split(MICRO)):
                if fault and step == FAULTY and fault.skipped == number:
                    continue
                logits = model(part)
                loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), part[:, 1:].flatten())
                (loss * MICRO / BATCH).backward()
            if fault and step == FAULTY and fault.gradient:
                model.get_parameter(fault.gradient).grad = None
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
