"""How a family is written in Hugging Face format: the keys of config.json, names and sizes of tensors."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from twinrun.foundation.errors import InputError

Sizes = Mapping[str, int]
Config = Mapping[str, Any]
SHAPE = "shape."


@dataclass(frozen=True)
class TensorPair:
    """One tensor under both names."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    """As we have it."""
    transposed: bool = False
    viewed: tuple[int, ...] | None = None
    """As they have it, where the bytes are the same."""

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Return the shape as they have it."""
        return self.viewed or (self.shape[::-1] if self.transposed else self.shape)


@dataclass(frozen=True, kw_only=True)
class Form:
    """One family of ours as a class of transformers."""

    family: str
    model_type: str
    architecture: str
    fixed: Mapping[str, tuple[object, object]]
    """Keys of config.json that only have one value for our model, and what a missing key means."""
    config: Callable[[Sizes], dict[str, object]]
    """Returns the keys that follow from the sizes of a member."""
    sizes: Callable[[Config], dict[str, int]]
    """Returns those sizes; raises KeyError and ValueError."""
    pairs: Callable[[Sizes], Iterator[TensorPair]]
    absent: tuple[str, ...] = field(default=())
    """Sizes of ours that a member may have, and that they cannot hold."""

    def identity(self, sizes: Sizes) -> dict[str, str]:
        """Return what a checkpoint says of the model's shape."""
        known = {f"{SHAPE}{name}": str(size) for name, size in sizes.items()}
        return {f"{SHAPE}family": self.family, **known, **{f"{SHAPE}{name}": "None" for name in self.absent}}


@cache
def forms() -> tuple[Form, ...]:
    """Return the form of each family that has one."""
    package = importlib.import_module(__package__ or "")
    found = (
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    )
    return tuple(module.FORM for module in found if hasattr(module, "FORM"))


def form_of(identity: Mapping[str, str], *, place: str) -> tuple[Form, dict[str, int]]:
    """Return the form of the model that a checkpoint is of, and its sizes.

    Raises:
        InputError: transformers has no class that holds it.
    """
    family = identity.get(f"{SHAPE}family", "unknown")
    form = next((one for one in forms() if one.family == family), None)
    if form is None:
        raise InputError(
            "this family has no Hugging Face format",
            place=f"{place}:{SHAPE}family",
            found=family,
            allowed=[one.family for one in forms()],
        )
    for name in form.absent:
        if (found := identity.get(SHAPE + name, "None")) != "None":
            raise InputError(
                f"{form.architecture} of transformers cannot hold it",
                place=f"{place}:{SHAPE}{name}",
                found=found,
                allowed="None",
            )
    shape = {name.removeprefix(SHAPE): one for name, one in identity.items() if name.startswith(SHAPE)}
    return form, {name: int(one) for name, one in shape.items() if one.isdecimal()}


def form_of_config(config: Config, *, place: str) -> tuple[Form, dict[str, int]]:
    """Return the form of the model that a config.json describes, and its sizes.

    Raises:
        InputError: no family of ours is that model; names the first key that differs.
    """
    form = next((one for one in forms() if one.model_type == config.get("model_type")), None)
    if form is None:
        raise InputError(
            "no family of ours is such a model",
            place=f"{place}:model_type",
            found=config.get("model_type"),
            allowed=[one.model_type for one in forms()],
        )
    for key, (allowed, default) in form.fixed.items():
        if (found := config.get(key, default)) != allowed:
            raise InputError(
                f"our {form.family} is another model", place=f"{place}:{key}", found=found, allowed=allowed
            )
    try:
        return form, form.sizes(config)
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"not the sizes of a {form.model_type}: {error}", place=place) from None
