"""Which class of transformers a checkpoint's model is, and which family of ours a config.json describes."""

from __future__ import annotations

from collections.abc import Mapping

from twinrun.foundation.errors import InputError
from twinrun.protocol.hugging_face import SHAPE, Config, Form
from twinrun.protocol.models import FORMS

SWITCHES = {"True": True, "False": False}


def form_of(identity: Mapping[str, str], *, place: str) -> tuple[Form, dict[str, int]]:
    """Return the form of the model that a checkpoint is of, and its sizes.

    Raises:
        InputError: transformers has no class that holds it.
    """
    family = identity.get(f"{SHAPE}family", "unknown")
    form = next((one for one in FORMS if one.family == family), None)
    if form is None:
        raise InputError(
            "this family has no Hugging Face format",
            place=f"{place}:{SHAPE}family",
            found=family,
            allowed=[one.family for one in FORMS],
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
    sizes = {name: int(one) for name, one in shape.items() if one.isdecimal()}
    return form, sizes | {name: SWITCHES[one] for name, one in shape.items() if one in SWITCHES}


def form_of_config(config: Config, *, place: str) -> tuple[Form, dict[str, int]]:
    """Return the form of the model that a config.json describes, and its sizes.

    Raises:
        InputError: no family of ours is that model; names the first key that differs.
    """
    form = next((one for one in FORMS if one.model_type == config.get("model_type")), None)
    if form is None:
        raise InputError(
            "no family of ours is such a model",
            place=f"{place}:model_type",
            found=config.get("model_type"),
            allowed=[one.model_type for one in FORMS],
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
