"""Model families as the host knows them: the shape of a member, and what follows from it without building it.

A family is one module here, a table of its name with the members that several recipes train, and a module of
its name in `twinrun/train/models/` that builds it. `SHAPE` of the module here is the class of the members,
and `FORM`, where it has one, their Hugging Face form.
"""

from __future__ import annotations

import functools
import importlib
import operator
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from twinrun.foundation.errors import InputError, closest
from twinrun.foundation.manifest import read_toml, validate
from twinrun.protocol.hugging_face import Form
from twinrun.protocol.measurements import BUS_BANDWIDTH, FORWARD_SHARE
from twinrun.protocol.models.shape import ModelShape

_MODULES = {
    module.name: importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if module.name != "shape"
}
FAMILIES: dict[str, type[ModelShape]] = {name: module.SHAPE for name, module in _MODULES.items()}
FORMS: tuple[Form, ...] = tuple(one.FORM for one in _MODULES.values() if hasattr(one, "FORM"))
FORMULAS = (BUS_BANDWIDTH, FORWARD_SHARE, *(one for shape in FAMILIES.values() for one in shape.formulas))
"""Identifiers of all formulas that numbers are named after; each family says where its own stand."""

if TYPE_CHECKING:
    AnyShape = ModelShape
else:
    AnyShape = functools.reduce(operator.or_, FAMILIES.values())
    if len(FAMILIES) > 1:
        AnyShape = Annotated[AnyShape, Field(discriminator="family")]

__all__ = ["FAMILIES", "FORMS", "FORMULAS", "AnyShape", "ModelShape", "member", "members"]


@functools.cache
def members() -> dict[str, ModelShape]:
    """Return the members of all families by name."""
    found: dict[str, ModelShape] = {}
    for family, shape in FAMILIES.items():
        path = Path(__file__).with_name(f"{family}.toml")
        for name, sizes in (read_toml(path) if path.is_file() else {}).items():
            found[name] = validate(sizes, shape, place=f"{path}:{name}")
    return found


def member(name: str, *, place: str) -> ModelShape:
    """Return the member called `name`; `NAME-SEQUENCE` is one whose sequences have another length.

    Raises:
        InputError: no family has it.
    """
    base, _, sequence = name.rpartition("-")
    if name in members():
        return members()[name]
    if base in members() and sequence.isdecimal():
        shape = members()[base]
        return validate(shape.model_dump() | {"sequence": int(sequence)}, type(shape), place=place)
    message, hint = "no such member of a model family", closest(name, members())
    raise InputError(message, place=place, found=name, allowed=sorted(members()), hint=hint)
