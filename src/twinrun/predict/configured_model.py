"""A model of somebody else, read from the config.json that Hugging Face keeps beside weights."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path

from pydantic import Field

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.manifest import Frozen, load_toml, validate
from twinrun.protocol.models.shape import BlockWork, ModelShape, ModelWork, Positive, Product

# Longest sequence that is taken where nobody names one; a config.json says what a model could hold.
MOST_TOKENS = 8192


class ConfigKind(Frozen):
    """A kind of models that config.json may be of."""

    family: str
    fixed: dict[str, bool | int]
    """Fields of a shape that are the same for all of the kind."""
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
    positions: bool = False
    """Whether positions are learned."""
    tied: bool = False
    experts: Positive = 1
    active: Positive = 1
    """Experts that a token meets."""
    states: Positive | None = None
    """States of a channel of a scan; none without one."""
    expansion: Positive = 4
    convolution: Positive = 4
    scan_groups: Positive = 1

    def attention_heads(self) -> int:
        """Return the heads of queries, 0 where it scans."""
        return 0 if self.states else self.heads

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
        block = self._scan() if self.states else self._attention()
        head = Product(self.vocabulary, self.width, "columns")
        rows = self.vocabulary + (self.sequence if self.positions else 0)
        # The last norm has a bias where the others have one.
        embedding = rows * self.width + (self.width if self.biases else 0)
        return ModelWork(block, self.layers, self.sequence, head, embedding, self.tied)

    def _attention(self) -> BlockWork:
        width, hidden = self.width, self.hidden or 4 * self.width
        head = self.head or width // self.heads
        queries, keys = self.heads * head, 2 * (self.groups or self.heads) * head
        up = (2 if self.gated else 1) * hidden
        products = (
            Product(queries + keys, width, "columns"),
            Product(width, queries, "inner"),
            Product(up, width, "columns", self.experts, self.active),
            Product(width, hidden, "inner", self.experts, self.active),
        )
        norms = (4 if self.biases else 2) * width
        biases = queries + keys + 2 * width + hidden if self.biases else 0
        biases += queries + keys if self.attention_biases else 0
        router = self.experts * width if self.experts > 1 else 0
        fed = self.active * ((3 if self.gated else 2) * hidden)
        return BlockWork(
            products=products,
            vectors=norms + biases + router,
            width=width,
            hidden=self.active * hidden,
            kept=2 * (4 * width + 3 * queries + width + fed),
            kept_products=2 * (2 * width + queries + keys + self.active * up),
            kept_input=2 * width,
            attention_flops=4 * self.sequence * queries,
            scores=self.heads * self.sequence,
            keys=keys,
        )

    def _scan(self) -> BlockWork:
        assert self.states
        width, channels = self.width, self.expansion * self.width
        if self.family == "mamba":
            rank = math.ceil(width / 16)
            products: tuple[Product, ...] = (
                Product(2 * channels, width, "columns"),
                Product(rank + 2 * self.states, channels, "inner"),
                Product(channels, rank, "columns"),
                Product(width, channels, "inner"),
            )
            vectors = channels * (self.convolution + 3 + self.states) + width
        else:
            mixed = channels + 2 * self.scan_groups * self.states
            products = (
                Product(channels + mixed + self.heads, width, "columns"),
                Product(width, channels, "inner"),
            )
            vectors = mixed * (self.convolution + 1) + 3 * self.heads + channels + width
        return BlockWork(
            products=products,
            vectors=vectors,
            width=width,
            hidden=channels,
            kept=33 * width,
            kept_products=19 * width,
            kept_input=4 * width,
            scanned=channels * self.states,
        )


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
    file, known = path / "config.json" if path.is_dir() else path, config_keys()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError("no config.json of a model", place=str(file), found=str(error)) from error
    kind = str(found.get("model_type")) if isinstance(found, dict) else "none"
    require_known(kind, sorted(known.kind), "no kind of model that is known", place=f"{file}: model_type")
    family, keys, fixed = known.kind[kind].family, known.keys | known.kind[kind].keys, known.kind[kind].fixed
    sizes = {name: found[key] for name, key in keys.items() if found.get(key) is not None}
    if kind == "mpt":
        sizes["expansion"] = found.get("expansion_ratio", 4)
        alibi = (found.get("attn_config") or {}).get("alibi", False)
        sizes |= {"hidden": sizes["expansion"] * sizes.get("width", 0), "positions": not alibi}
    if family.startswith("mamba"):
        sizes.pop("hidden", None)
    allowed = sizes.get("sequence", MOST_TOKENS)
    table = {**fixed, **sizes, "family": family, "sequence": sequence or min(allowed, MOST_TOKENS)}
    missing = [keys[name] for name in ("width", "layers", "vocabulary") if name not in table]
    if missing:
        raise InputError("a size is missing", place=str(file), found=f"no {', '.join(missing)}")
    said = {key for key, value in found.items() if value not in (None, False)}
    silent = {key for key in said if any(pattern.fullmatch(key) for pattern in known.silent)}
    strange = tuple(sorted(said - silent - set(keys.values())))
    return validate(table, ConfiguredShape, place=str(file)), strange
