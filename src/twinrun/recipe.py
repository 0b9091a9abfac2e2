"""Recipes: one published experiment each, found by scanning `recipes/`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from twinrun.claims import Published, load_published
from twinrun.errors import InputError, closest
from twinrun.files import is_file_in
from twinrun.manifest import Frozen, load_toml
from twinrun.training import DataSource, ModelShape, Positive, Training

SCALES = ("smoke", "node", "paper")


class Publication(Frozen):
    """What the recipe reproduces."""

    key: str
    """Short key that claims cite."""
    title: str
    by: str
    published: str
    """Date as far as known, ISO 8601."""
    figure: str


class Stacks(Frozen):
    """Stacks of images/stacks/ that the recipe runs in."""

    current: dict[str, str]
    """The stack for each vendor."""
    published: tuple[str, ...] = ()
    """Stacks with the software of the publication."""


class Sweep(Frozen):
    """The points of a scale; exactly one of the two ways to say it."""

    devices: tuple[Positive, ...] | Literal["powers-of-two"] | None = None
    """Devices of one machine; `powers-of-two` up to all the machine has."""
    nodes: tuple[Positive, ...] | None = None
    """Nodes of the published cluster."""
    devices_per_node: Positive | None = None
    """Devices, not cards, of one node."""

    @model_validator(mode="after")
    def _one_way(self) -> Sweep:
        if bool(self.devices) == bool(self.nodes):
            raise ValueError("a sweep has either `devices` or `nodes`")
        if bool(self.nodes) != bool(self.devices_per_node):
            raise ValueError("`devices_per_node` goes with `nodes`, and only with them")
        return self


class Scale(Frozen):
    """One size at which the experiment runs."""

    summary: str
    sweep: Sweep
    models: tuple[str, ...] = ()
    """Candidates, largest first, where the machine decides; the first that fits is taken."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Fields of [training] that differ at this scale; dotted names reach into tables."""


class Recipe(Frozen):
    """recipe.toml."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    version: Positive
    """Raised by every change that may move a number."""
    title: str
    publication: Publication
    script: str
    """File of the recipe that every rank runs."""
    baseline: str | None = None
    """File that trains the same job in a plain PyTorch loop, for `--set trainer=plain`."""
    kernels: tuple[str, ...] = ()
    """Other recipes whose kernels are used."""
    stacks: Stacks
    models: dict[str, ModelShape]
    data: dict[str, DataSource]
    training: Training
    """The published configuration."""
    scales: dict[str, Scale]


class LoadedRecipe(Frozen):
    """A recipe with its claims and the folder it stands in, relative to the root."""

    recipe: Recipe
    published: Published
    folder: str

    def script(self, trainer: str) -> str:
        """Return the path of the script that trains with `trainer`, relative to the root.

        Raises:
            InputError: the recipe has no plain loop.
        """
        name = self.recipe.script if trainer == "composer" else self.recipe.baseline
        if name is None:
            raise InputError(
                "the recipe has no plain loop", place="--set trainer", found=trainer, allowed="composer"
            )
        return f"{self.folder}/{name}"


def find_recipes(root: Path) -> dict[str, LoadedRecipe]:
    """Load every folder of `root/recipes`; a broken one is an InputError, never skipped."""
    base = root / "recipes"
    if not base.is_dir():
        raise InputError("no such folder", place=str(base), hint="run twinrun from its checkout")
    folders = sorted(path for path in base.iterdir() if path.is_dir())
    return {folder.name: load_recipe(root, folder.name) for folder in folders}


def load_recipe(root: Path, name: str) -> LoadedRecipe:
    """Load the recipe called `name`, or at the path `recipes/<name>`.

    Raises:
        InputError: no such recipe, or a manifest that does not hold.
    """
    folder = root / "recipes" / Path(name).name
    if not is_file_in(folder, "recipe.toml") or not _names(root, name, folder):
        known = sorted(path.parent.name for path in (root / "recipes").glob("*/recipe.toml"))
        raise InputError(
            "unknown recipe",
            place=name,
            found=name,
            allowed=[f"recipes/{item}" for item in known],
            hint=closest(Path(name).name, known),
        )
    place = folder / "recipe.toml"
    recipe = load_toml(place, Recipe)
    _check(recipe, place, folder)
    return LoadedRecipe(
        recipe=recipe, published=load_published(folder), folder=folder.relative_to(root).as_posix()
    )


def _names(root: Path, name: str, folder: Path) -> bool:
    path = Path(name)
    here = path if path.is_absolute() else root / path
    return len(path.parts) == 1 or here.resolve() == folder.resolve() or path.resolve() == folder.resolve()


def _check(recipe: Recipe, place: Path, folder: Path) -> None:
    """Hold the names inside a recipe against each other."""

    def demand(key: str, found: str, allowed: object) -> None:
        choices = sorted(allowed) if isinstance(allowed, dict) else [str(allowed)]
        if found not in choices:
            raise InputError(
                "no such name",
                place=f"{place}:{key}",
                found=found,
                allowed=choices,
                hint=closest(found, choices),
            )

    demand("name", recipe.name, folder.name)
    demand("training.model", recipe.training.model, recipe.models)
    demand("training.data", recipe.training.data, recipe.data)
    for name, scale in recipe.scales.items():
        for model in scale.models:
            demand(f"scales.{name}.models", model, recipe.models)
    for name in recipe.scales:
        demand(f"scales.{name}", name, dict.fromkeys(SCALES))
    for name in SCALES:
        demand("scales", name, dict(recipe.scales))
    for key, script in (("script", recipe.script), ("baseline", recipe.baseline)):
        if script is not None and not is_file_in(folder, script):
            raise InputError("no such file in the recipe's folder", place=f"{place}:{key}", found=script)
