"""A model of somebody else, read from the config.json that Hugging Face keeps beside weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.manifest import Frozen, load_toml, validate
from twinrun.protocol.models.shape import BlockWork, ModelShape, ModelWork, Positive, Product

CONFIGS = Path(__file__).with_name("configs.json")
# Longest sequence that is taken where nobody names one; a config.json says what a model could hold.
MOST_TOKENS = 8192


class ConfigKind(Frozen):
    """A kind of models that config.json may be of."""

    family: str
    fixed: dict[str, bool | int]
    """Fields of a shape that are the same for all of the kind."""
    inside: str | None = None
    """Key of the table that has the keys, where they are not at the top."""
    keys: dict[str, str] = Field(default_factory=dict)
    """By field of a shape the key that says it, where it is not that of the others."""


class ConfigKeys(Frozen):
    """predict/config_keys.toml."""

    keys: dict[str, str]
    silent: tuple[re.Pattern[str], ...]
    """Expressions of keys that say nothing of time and memory, or what follows from the sizes."""
    kind: dict[str, ConfigKind]


@cache
def config_keys() -> ConfigKeys:
    """Return what keys of config.json mean."""
    return load_toml(Path(__file__).with_name("config_keys.toml"), ConfigKeys)


class ConfiguredShape(ModelShape):
    """A model whose config.json says its sizes."""

    formulas = ("model-flops/6M+6LDS", "model-flops/6M+12LDS")

    width: Positive
    layers: Positive
    heads: Positive = 1
    groups: Positive | None = None
    """Heads of keys and values; as many as of queries where not given."""
    head: Positive | None = None
    """Features of a head; the width is shared where not given."""
    hidden: Positive | None = None
    """Features between the products of the feed-forward layer; four times the width where not given."""
    gated: bool = False
    biases: bool = False
    attention_biases: bool = False
    biased_experts: bool = False
    sinks: bool = False
    """Whether each head has a weight for no token."""
    norms: Positive = 2
    """Norms of a block over its width."""
    head_norms: Annotated[int, Field(ge=0)] = 0
    """Norms of a block over a head."""
    wide_norms: bool = False
    """Whether queries and keys have norms over all of their heads."""
    window: Positive | None = None
    """Tokens before one that it sees, in all blocks but some."""
    every: Positive | None = None
    """One of so many blocks sees all tokens; without it a window is not used."""
    positions: bool = False
    """Whether positions are learned."""
    tied: bool = False
    experts: Positive = 1
    active: Positive = 1
    """Experts that a token meets."""
    shared: Annotated[int, Field(ge=0)] = 0
    """Experts of a size that every token meets besides."""
    dense: Annotated[int, Field(ge=0)] = 0
    """First blocks whose feed-forward layer has no experts."""
    dense_hidden: Positive | None = None
    """Features of that layer."""
    query_rank: Positive | None = None
    """Features that queries are made of, and keys and values; latent attention where both are given."""
    key_rank: Positive | None = None
    turned: Annotated[int, Field(ge=0)] = 0
    """Features of a head that positions turn, one set of keys for all heads."""
    value_head: Positive | None = None

    def parameters(self) -> int:
        """Count the parameters."""
        return self.work().parameters

    def flops_per_token(self) -> int:
        """Return the FLOP of a token, forward and backward, with the causal half of attention."""
        return self.flops_by_formula()[self.formula]

    def flops_by_formula(self) -> dict[str, int]:
        """Return the FLOP of a token with the causal half of attention, and with the whole."""
        return dict(zip(self.formulas, generic_flops(self.work()), strict=True))

    def work(self) -> ModelWork:
        """Return what a pass has to do."""
        block = self._block()
        head = Product(self.vocabulary, self.width, "columns")
        rows = self.vocabulary + (self.sequence if self.positions else 0)
        # The last norm has a bias where the others have one.
        embedding = rows * self.width + (self.width if self.biases else 0)
        return ModelWork(block, self.layers, self.sequence, head, embedding, self.tied, absent=self._absent())

    def _block(self) -> BlockWork:
        width, hidden = self.width, self.hidden or 4 * self.width
        head = self.head_size()
        queries, keys = self.heads * head, 2 * (self.groups or self.heads) * head
        values = self.heads * (self.value_head or head)
        up = (2 if self.gated else 1) * hidden
        products: tuple[Product, ...] = (Product(queries + keys, width, "columns"),)
        norms = 2 * head if self.head_norms else 0
        if self.query_rank and self.key_rank:
            inner, made = self.key_rank + self.turned, self.heads * (head - self.turned) + values
            keys, norms = inner, self.query_rank + self.key_rank
            products = (
                Product(self.query_rank + inner, width, "inner"),
                Product(queries, self.query_rank, "columns"),
                Product(made, self.key_rank, "columns"),
            )
        products += (
            Product(width, values, "inner"),
            Product(up, width, "columns", self.experts, self.active),
            Product(width, hidden, "inner", self.experts, self.active),
        )
        if self.shared:
            products += (
                Product(self.shared * up, width, "columns"),
                Product(width, self.shared * hidden, "inner"),
            )
        norms += (4 if self.biases else self.norms) * width
        norms += queries + keys // 2 if self.wide_norms else 0
        biases = queries + keys + 2 * width + hidden if self.biases else 0
        biases += queries + keys if self.attention_biases else 0
        # Every product of GPT-OSS has one, the router too, and every head a sink.
        biases += width + self.experts * (up + width + 1) if self.biased_experts else 0
        biases += self.heads if self.sinks else 0
        router = self.experts * (width + bool(self.key_rank)) if self.experts > 1 else 0
        met = self.active + self.shared
        fed = met * ((3 if self.gated else 2) * hidden)
        return BlockWork(
            products=products,
            vectors=norms + biases + router,
            width=width,
            hidden=met * hidden,
            kept=2 * (4 * width + 2 * queries + values + width + fed),
            kept_products=2 * (2 * width + queries + keys + met * up),
            kept_input=2 * width,
            attention_flops=round(2 * (queries + values) * self._seen()),
            scores=self.heads * self.sequence,
            head=head,
            keys=keys,
        )

    def head_size(self) -> int:
        """Return the features of a head of queries."""
        return (self.head or self.width // self.heads) + self.turned

    def _seen(self) -> float:
        """Return the tokens that one meets, twice those before it, in the mean of all blocks."""
        if not self.window or not self.every or 2 * self.window >= self.sequence:
            return float(self.sequence)
        whole = self.layers // self.every
        return (whole * self.sequence + (self.layers - whole) * 2 * self.window) / self.layers

    def _absent(self) -> int:
        """Return the weights of experts that the first blocks have not, less those of their layer."""
        if not self.dense:
            return 0
        one = (3 if self.gated else 2) * self.width
        experts = (self.experts + self.shared) * one * (self.hidden or 0) + self.experts * (self.width + 1)
        return self.dense * (experts - one * (self.dense_hidden or 0))


def generic_flops(work: ModelWork) -> tuple[int, int]:
    """Return the FLOP of a token, forward and backward, with the causal half of attention and with all."""
    met = sum(one.weights // one.experts * one.active for one in work.block.products)
    weights = work.layers * met + work.head.weights
    attention = 3 * work.layers * work.block.attention_flops
    return 6 * weights + attention // 2, 6 * weights + attention


def configured(path: Path, *, sequence: int | None = None) -> tuple[ConfiguredShape, tuple[str, ...]]:
    """Return the model of a config.json, or of a folder with one, and the keys that were not understood.

    Args:
        sequence: tokens of a sequence; where not given, what the file allows and at most `MOST_TOKENS`.

    Raises:
        InputError: no such file, no JSON, a kind of model that is not known, or a size that is missing.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError("no config.json of a model", place=str(file), found=str(error)) from error
    return of_config(found, sequence=sequence, file=str(file))


@cache
def published_configs() -> dict[str, dict[str, Any]]:
    """Return the config.json of models that rows name."""
    found: dict[str, dict[str, Any]] = json.loads(CONFIGS.read_text(encoding="utf-8"))
    return found


def of_config(found: Any, *, sequence: int | None, file: str) -> tuple[ConfiguredShape, tuple[str, ...]]:
    """Return the model that the keys of a config.json say, and the keys that were not understood.

    Raises:
        InputError: a kind of model that is not known, a size that is missing, or one that does not divide.
    """
    known = config_keys()
    kind = str(found.get("model_type")) if isinstance(found, dict) else "none"
    require_known(kind, sorted(known.kind), "no kind of model that is known", place=f"{file}: model_type")
    if inside := known.kind[kind].inside:
        found = found.get(inside, {}) | {"model_type": kind}
    family, keys, fixed = known.kind[kind].family, known.keys | known.kind[kind].keys, known.kind[kind].fixed
    sizes = {name: found[key] for name, key in keys.items() if found.get(key) is not None}
    if kind == "mpt":
        alibi = (found.get("attn_config") or {}).get("alibi", False)
        hidden = found.get("expansion_ratio", 4) * sizes.get("width", 0)
        sizes |= {"hidden": hidden, "positions": not alibi}
    allowed = sizes.get("sequence", MOST_TOKENS)
    table = {**fixed, **sizes, "family": family, "sequence": sequence or min(allowed, MOST_TOKENS)}
    missing = [keys[name] for name in ("width", "layers", "vocabulary") if name not in table]
    if missing:
        raise InputError("a size is missing", place=file, found=f"no {', '.join(missing)}")
    said = {key for key, value in found.items() if value not in (None, False)}
    silent = {key for key in said if any(pattern.fullmatch(key) for pattern in known.silent)}
    strange = tuple(sorted(said - silent - set(keys.values())))
    shape = validate(table, ConfiguredShape, place=file)
    _heads(shape, keys, file)
    return shape, strange


def _heads(shape: ConfiguredShape, keys: Mapping[str, str], file: str) -> None:
    """Refuse heads that do not divide, by the names that the file has for them."""
    pairs = [(keys["width"], shape.width, keys["heads"], shape.heads)] if not shape.head else []
    pairs += [(keys["heads"], shape.heads, keys["groups"], shape.groups or shape.heads)]
    for whole, size, part, count in pairs:
        if size % count:
            raise InputError(
                f"{part} = {count} does not divide {whole} = {size}",
                place=f"{file}: {part}",
                found=count,
                allowed=f"a divisor of {size}",
            )
