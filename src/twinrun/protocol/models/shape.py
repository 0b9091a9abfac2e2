"""What every family says of its members."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from twinrun.foundation.manifest import Frozen
from twinrun.protocol.work import ModelWork

Positive = Annotated[int, Field(gt=0)]
# Tokens whose logits are there at once.
HEAD_TOKENS = 8192
SelectiveCheckpointing = Literal["selective", "selective-alternate"]
ActivationCheckpointing = bool | SelectiveCheckpointing
"""Whether blocks are computed again in the backward pass: none, whole, or all but their matrix products, of
which `selective-alternate` keeps every other one."""


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

    @abstractmethod
    def parameters(self) -> int:
        """Count the parameters; ranks count them again on the meta device."""

    @abstractmethod
    def flops_per_token(self) -> int:
        """Return the FLOP of a token by `formula`, forward and backward."""

    def flops_by_formula(self) -> dict[str, int]:
        """Return the FLOP of a token by each of `formulas`."""
        return {self.formula: self.flops_per_token()}

    @abstractmethod
    def work(self) -> ModelWork:
        """Return what a pass has to do, from which time and memory are predicted."""

    def attention_heads(self) -> int:
        """Return the number of attention heads, 0 without attention."""
        return 0

    def key_heads(self) -> int:
        """Return the number of heads of keys and values, which queries may share."""
        return self.attention_heads()

    def head_size(self) -> int:
        """Return the width of an attention head, 0 without attention."""
        return 0
