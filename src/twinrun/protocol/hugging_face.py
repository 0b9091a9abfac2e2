"""The Hugging Face form of a model family: config.json, and the names and shapes of tensors.

Our parameters have upstream's names, so that transformers has the same names behind a prefix. A family's form
is `FORM` of its module in `twinrun/protocol/models/`; without one its checkpoints are not converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Sizes = Mapping[str, int]
"""Sizes of a member by name; a switch is a boolean."""
Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
SHAPE = "shape."
"""What the names of sizes begin with in the identity of a checkpoint."""


class TensorPair(NamedTuple):
    """One tensor under both names."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    """Shape in this project's models."""
    transposed: bool = False

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Return the shape as they have it."""
        return self.shape[::-1] if self.transposed else self.shape


@dataclass(frozen=True, kw_only=True)
class Form:
    """One family of ours as a class of transformers."""

    family: str
    model_type: str
    architecture: str
    fixed: Mapping[str, tuple[object, object]]
    """Keys of config.json that only have one value for our model, and what a missing key means."""
    unset: Mapping[str, object]
    """Keys of training and of generating text, of which weights say nothing."""
    config: Callable[[Sizes], dict[str, object]]
    """Returns the keys that follow from the sizes of a member."""
    sizes: Callable[[Config], dict[str, int]]
    """Returns those sizes; raises KeyError and ValueError."""
    shapes: Callable[[Sizes], Shapes]
    """Returns the shape of every tensor by our name."""
    prefix: str
    """What a name has before ours."""
    without_prefix: tuple[str, ...] = ()
    """Beginnings of names that have no prefix."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of our names that are called otherwise."""
    transposed: tuple[str, ...] = ()
    """Endings of our names of matrices that they keep as inputs by outputs."""
    absent: tuple[str, ...] = ()
    """Sizes of ours that a member may have, and that they cannot hold."""

    def identity(self, sizes: Sizes) -> dict[str, str]:
        """Return what a checkpoint says of the model's shape."""
        known = {f"{SHAPE}{name}": str(size) for name, size in sizes.items()}
        return {f"{SHAPE}family": self.family, **known, **{f"{SHAPE}{name}": "None" for name in self.absent}}

    def pairs(self, sizes: Sizes) -> Iterator[TensorPair]:
        """Yield every tensor of a member."""
        for name, shape in self.shapes(sizes).items():
            theirs = name if name.startswith(self.without_prefix) else self.prefix + name
            for ours, other in self.renamed.items():
                theirs = theirs.replace(ours, other)
            yield TensorPair(name, theirs, shape, transposed=name.endswith(self.transposed))


def of_blocks(count: int, block: Shapes) -> Shapes:
    """Return the shapes of the tensors of all blocks; `*` in a name is the block's number."""
    return {name.replace("*", str(number)): shape for number in range(count) for name, shape in block.items()}
