"""Whose memory and time are asked for: a recipe's model, a member of a family, or a config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twinrun.foundation.errors import InputError, require_known
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.settings import parse_settings
from twinrun.predict.configured_model import configured
from twinrun.predict.request import LayoutSettings, Trains, with_sequence
from twinrun.protocol.models import ModelShape, member, members

# Sequences of a step where a model is named and no recipe.
GLOBAL_BATCH = 512


@dataclass(frozen=True)
class Subject:
    """The model and its training, and in words what nobody said."""

    shape: ModelShape
    settings: LayoutSettings
    name: str
    silent: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()
    """Keys of a config.json that were not understood."""

    @property
    def said(self) -> list[str]:
        """The model in words, and what was left out of it."""
        size = f"{self.shape.parameters() / 1e9:.3g}B parameters"
        named = f"{self.name}: {size}, sequences of {self.shape.sequence:,} tokens."
        strange = f"Not understood, and left out: {', '.join(self.strange)}."
        return [named, *([strange] if self.strange else [])]


def subject_of_model(name: str, texts: Sequence[str]) -> Subject:
    """Return a member of a family, or what somebody's config.json says; raises InputError."""
    given, path = parse_settings(tuple(texts)), Path(name)
    if "model" in given:
        hint = f"twinrun predict {given['model']}"
        raise InputError("the model is the argument", place="--set model", found=given["model"], hint=hint)
    settings = LayoutSettings(model=name, global_batch=GLOBAL_BATCH).with_settings(given)
    silent = {"global_batch": f"{GLOBAL_BATCH} sequences a step", "shards": "all states split (FSDP)"}
    untold = tuple(text for key, text in silent.items() if key not in given)
    if path.suffix == ".json" or path.is_dir():
        config, strange = configured(path, sequence=settings.sequence)
        return Subject(config, settings, name, untold, strange)
    shape = with_sequence(member(name, place="twinrun predict"), settings.sequence)
    return Subject(shape, settings, name, untold)


def subject_of_recipe(recipe: LoadedRecipe, texts: Sequence[str]) -> Subject:
    """Return the model that a recipe trains; raises InputError where it trains none."""
    tables, name = recipe.tables, recipe.folder
    if not isinstance(tables, Trains):
        hint = f"name a model: {', '.join(sorted(members()))}"
        raise InputError("this recipe trains nothing", place=name, hint=hint)
    settings = LayoutSettings.of(tables.training).with_settings(parse_settings(tuple(texts)))
    require_known(settings.model, sorted(tables.models), "no such model", place="--set model")
    shape = with_sequence(tables.models[settings.model], settings.sequence)
    return Subject(shape, settings, f"{name}: {settings.model}")
