"""Model families as the host knows them: the shape of a member, and what follows from it without building it.

A family is one module here, whose `SHAPE` is the class of its members, and one of the same name in
`twinrun/train/models/` that builds it.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from twinrun.protocol.models.shape import ModelShape

FAMILIES: dict[str, type[ModelShape]] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").SHAPE
    for module in pkgutil.iter_modules(__path__)
    if module.name != "shape"
}

if TYPE_CHECKING:
    AnyShape = ModelShape
elif len(FAMILIES) == 1:
    (AnyShape,) = FAMILIES.values()
else:
    _first, *_others = FAMILIES.values()
    _union = _first
    for _one in _others:
        _union = _union | _one
    AnyShape = Annotated[_union, Field(discriminator="family")]

__all__ = ["FAMILIES", "AnyShape", "ModelShape"]
