"""What every family says of its members, and what one pass of a model does, whatever the GPU and software."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from twinrun.foundation.manifest import Frozen

Positive = Annotated[int, Field(gt=0)]
# Tokens whose logits are there at once.
HEAD_TOKENS = 8192
ActivationCheckpointing = bool | Literal["selective", "selective-alternate"]
"""Whether blocks are computed again in the backward pass: none, whole, or all but their matrix products, of
which `selective-alternate` keeps every other one."""


# Bytes of a logit while the loss is computed: 16-bit, its fp32 copy, its exponential, its 16-bit gradient.
LOGIT_BYTES = 12


@dataclass(frozen=True)
class Product:
    """A matrix of weights that every token is multiplied with."""

    columns: int
    """Features that come out."""
    inner: int
    """Features that go in."""
    cut: Literal["columns", "inner"]
    """Which of them tensor parallelism divides."""
    experts: int = 1
    """Copies of the matrix, of which a token meets `active`."""
    active: int = 1

    @property
    def weights(self) -> int:
        """Weights of all copies."""
        return self.columns * self.inner * self.experts


@dataclass(frozen=True)
class BlockWork:
    """One block; counts are of one token in the forward pass."""

    products: tuple[Product, ...]
    vectors: int
    """Parameters beside the matrices: biases, norms, convolutions."""
    width: int
    """Features of the residual stream."""
    hidden: int
    """Features between the products of the feed-forward layer, or of the scan."""
    kept: int
    """Bytes kept for the backward pass, with 16-bit activations."""
    kept_products: int
    """Bytes of these that are no cheaper to compute again: what the products take and give."""
    kept_input: int
    """Bytes of what enters the block, from which all can be computed again."""
    attention_flops: int = 0
    """Operations of queries with keys and of weights with values, every position with every other."""
    scores: int = 0
    """Elements of the attention matrices."""
    head: int = 0
    """Features of an attention head."""
    keys: int = 0
    """Features of keys and values, which ranks that share a sequence exchange."""
    scanned: int = 0
    """Channels times states of a selective scan."""

    @property
    def weights(self) -> int:
        """Parameters of the block."""
        return sum(one.weights for one in self.products) + self.vectors


@dataclass(frozen=True)
class ModelWork:
    """A model: equal blocks between an embedding and a head."""

    block: BlockWork
    layers: int
    sequence: int
    head: Product
    """The product that gives the logits."""
    embedding: int
    """Parameters of the embeddings, of the head too where both are one matrix."""
    tied: bool
    """Whether embedding and head are one matrix."""
    absent: int = 0
    """Weights that the first blocks do not have: experts, where these are dense."""
    logit_bytes: int = LOGIT_BYTES
    """Bytes of a logit beside what blocks keep; 0 where these count the head."""

    @property
    def multiplied(self) -> int:
        """Weights of all matrix products, the head included and the embedding not."""
        return self.layers * sum(one.weights for one in self.block.products) + self.head.weights

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, its last norm included."""
        head = 0 if self.tied else self.head.weights
        return self.layers * self.block.weights - self.absent + self.embedding + head + self.block.width


class ModelShape(Frozen):
    """One member of a model family; sizes are counts of features, layers or tokens."""

    fixed: ClassVar[Mapping[str, object]] = {}
    """Settings of a training that the family does not have, with the one value that they may be given."""
    fp8: ClassVar[bool] = False
    """Whether the matrix products of a block are modules, which recipes of fp8 replace."""
    dropout: ClassVar[float] = 0.0
    """Share of features that training drops; no family has a layer that drops any."""

    formulas: ClassVar[tuple[str, ...]]
    """Identifiers of the formulas that count its FLOP, first the one that it is compared by."""

    family: str
    """Module under `twinrun/train/models/` that builds it."""
    vocabulary: Positive
    """Rows of the token embedding."""
    sequence: Positive
    """Tokens in one training sequence."""

    @property
    def formula(self) -> str:
        """Identifier of the formula that it is compared by."""
        return self.formulas[0]

    def parameters(self) -> int:
        """Count the parameters; ranks count them again on the meta device."""
        return self.work().parameters

    @abstractmethod
    def flops_per_token(self) -> int:
        """Return the FLOP of a token by `formula`, forward and backward."""

    def flops_by_formula(self) -> dict[str, int]:
        """Return the FLOP of a token by each of `formulas`."""
        return {self.formula: self.flops_per_token()}

    @abstractmethod
    def work(self) -> ModelWork:
        """Return what a pass has to do, from which time and memory are predicted."""

    def _work(self, block: BlockWork, layers: int, *, tied: bool, beside: int = 0, **known: int) -> ModelWork:
        """Return the work of so many blocks between the embedding, with weights `beside` it, and the head."""
        head = Product(self.vocabulary, block.width, "columns")
        return ModelWork(block, layers, self.sequence, head, head.weights + beside, tied, **known)

    def attention_heads(self) -> int:
        """Return the number of attention heads, 0 without attention."""
        return 0

    def key_heads(self) -> int:
        """Return the number of heads of keys and values, which queries may share."""
        return self.attention_heads()

    def head_size(self) -> int:
        """Return the width of an attention head, 0 without attention."""
        return self.work().block.head
