"""A model of somebody else, read from the config.json that Hugging Face keeps beside weights.

What takes no time is not counted: biases, learned positions, and norms besides two of a block.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.manifest import read_toml, validate
from twinrun.protocol.models.shape import BlockWork, ModelShape, ModelWork, Positive, Product

# Longest sequence that is taken where nobody names one; a config.json says what a model could hold.
MOST_TOKENS = 8192


@cache
def config_keys() -> dict[str, Any]:
    """Return what keys of config.json mean."""
    return read_toml(Path(__file__).with_name("config_keys.toml"))


class ConfiguredShape(ModelShape):
    """A model whose config.json says its sizes."""

    formulas = ("model-flops/6M+6LDS",)

    width: Positive
    layers: Positive
    heads: Positive = 1
    groups: Positive | None = None
    """Heads of keys and values; as many as of queries where not given."""
    head: Positive | None = None
    """Features of a head; the width is shared where not given."""
    hidden: Positive | None = None
    """Features between the products of the feed-forward layer; four times the width where not given."""
    gated: bool = True
    window: Positive | None = None
    """Tokens before one that it sees, in all blocks but some."""
    every: Positive | None = None
    """One of so many blocks sees all tokens; without it a window is not used."""
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

    def flops_per_token(self) -> int:
        """Return the FLOP of a token, forward and backward, with the causal half of attention."""
        return generic_flops(self.work())

    def work(self) -> ModelWork:
        """Return what a pass has to do."""
        return self._work(self._block(), self.layers, tied=self.tied, absent=self._absent())

    def _block(self) -> BlockWork:
        width, hidden = self.width, self.hidden or 4 * self.width
        head = self.head_size()
        queries, keys = self.heads * head, 2 * (self.groups or self.heads) * head
        values = self.heads * (self.value_head or head)
        up = (2 if self.gated else 1) * hidden
        products: tuple[Product, ...] = (Product(queries + keys, width, "columns"),)
        if self.query_rank and self.key_rank:
            inner, made = self.key_rank + self.turned, self.heads * (head - self.turned) + values
            keys = inner
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
        if many := self.shared:
            products += (Product(many * up, width, "columns"), Product(width, many * hidden, "inner"))
        router, met = self.experts * width if self.experts > 1 else 0, self.active + self.shared
        return BlockWork(
            products=products,
            # Biases, and norms besides these two, are under two thousandths of any model.
            vectors=2 * width + router,
            width=width,
            hidden=met * hidden,
            kept=2 * (4 * width + 2 * queries + values + width + met * (up + hidden)),
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
        experts = (self.experts + self.shared) * one * (self.hidden or 0) + self.experts * self.width
        return self.dense * (experts - one * (self.dense_hidden or 0))


def generic_flops(work: ModelWork) -> int:
    """Return the FLOP of a token, forward and backward, with the causal half of attention."""
    met = sum(one.weights // one.experts * one.active for one in work.block.products)
    return 6 * (work.layers * met + work.head.weights) + 3 * work.layers * work.block.attention_flops // 2


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


def of_config(found: Any, *, sequence: int | None, file: str) -> tuple[ConfiguredShape, tuple[str, ...]]:
    """Return the model that the keys of a config.json say, and the keys that were not understood.

    Raises:
        InputError: a kind of model that is not known, a size that is missing, or one that does not divide.
    """
    known = config_keys()
    kind = str(found.get("model_type")) if isinstance(found, dict) else "none"
    require_known(kind, sorted(known["kind"]), "no kind of model that is known", place=f"{file}: model_type")
    own = {"keys": {}, "fixed": {}, **known["kind"][kind]}
    keys, found = known["keys"] | own["keys"], found.get(own["inside"], {}) if "inside" in own else found
    sizes = {name: found[key] for name, key in keys.items() if found.get(key) is not None}
    table = {"sequence": MOST_TOKENS, **own["fixed"], **sizes, "family": kind}
    table["sequence"] = sequence or min(table["sequence"], MOST_TOKENS)
    if missing := [keys[name] for name in ("width", "layers", "vocabulary") if name not in table]:
        raise InputError("a size is missing", place=file, found=f"no {', '.join(missing)}")
    said = {key for key, value in found.items() if value not in (None, False)} - set(keys.values())
    strange = (key for key in said if not re.fullmatch("|".join(known["silent"]), key))
    shape = validate(table, ConfiguredShape, place=file)
    for whole, size, part, count in (
        ("width", shape.width, "heads", 1 if shape.head else shape.heads),
        ("heads", shape.heads, "groups", shape.groups or shape.heads),
    ):
        if size % count:
            raise InputError(
                f"{keys[part]} = {count} does not divide {keys[whole]} = {size}",
                place=f"{file}: {keys[part]}",
                found=count,
                allowed=f"a divisor of {size}",
            )
    return shape, tuple(sorted(strange))
