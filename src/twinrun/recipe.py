"""Recipes: one published experiment each, found by scanning `recipes/`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from twinrun.benchmark import Bench, Settings
from twinrun.claims import Published, load_published
from twinrun.errors import InputError, closest
from twinrun.files import is_file_in
from twinrun.manifest import Frozen, has_table, load_toml
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


class BenchScale(Frozen):
    """One size at which the benchmark runs."""

    summary: str
    cases: tuple[str, ...]
    """Points of this scale, in their order."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Fields of [bench] that differ at this scale; dotted names reach into tables."""


class AnyRecipe(Frozen):
    """What every recipe.toml says."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    version: Positive
    """Raised by every change that may move a number."""
    title: str
    publication: Publication
    script: str
    """File of the recipe that every rank runs."""
    kernels: tuple[str, ...] = ()
    """Recipes whose kernels are used, this one or others."""
    stacks: Stacks


class Recipe(AnyRecipe):
    """recipe.toml of a training sweep, which has a table `training`."""

    baseline: str | None = None
    """File that trains the same job in a plain PyTorch loop, for `--set trainer=plain`."""
    models: dict[str, ModelShape]
    data: dict[str, DataSource]
    training: Training
    """The published configuration."""
    scales: dict[str, Scale]


class BenchRecipe(AnyRecipe):
    """recipe.toml of a benchmark, which has a table `bench`: one device, one process a case."""

    bench: Bench
    """How the publication measured, as far as it says."""
    cases: dict[str, Settings]
    """What the script is told at each case."""
    scales: dict[str, BenchScale]


class AnyLoaded(Frozen):
    """What stands in a recipe's folder."""

    published: Published
    folder: str
    """Relative to the root."""


class LoadedBench(AnyLoaded):
    """A benchmark with its claims."""

    recipe: BenchRecipe

    def script(self) -> str:
        """Return the path of the script, relative to the root."""
        return f"{self.folder}/{self.recipe.script}"


class LoadedRecipe(AnyLoaded):
    """A training sweep with its claims."""

    recipe: Recipe

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


def find_recipes(root: Path) -> dict[str, LoadedRecipe | LoadedBench]:
    """Load every folder of `root/recipes`; a broken one is an InputError, never skipped."""
    base = root / "recipes"
    if not base.is_dir():
        raise InputError("no such folder", place=str(base), hint="run twinrun from its checkout")
    folders = sorted(path for path in base.iterdir() if path.is_dir())
    return {folder.name: load_any_recipe(root, folder.name) for folder in folders}


def load_recipe(root: Path, name: str) -> LoadedRecipe:
    """Load a training sweep as `load_any_recipe` does; a benchmark is an InputError."""
    loaded = load_any_recipe(root, name)
    if isinstance(loaded, LoadedBench):
        raise InputError(
            "the recipe is a benchmark and trains nothing",
            place=f"{loaded.folder}/recipe.toml",
            found="bench",
            allowed="training",
        )
    return loaded


def load_any_recipe(root: Path, name: str) -> LoadedRecipe | LoadedBench:
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
    where = folder.relative_to(root).as_posix()
    if has_table(place, "bench"):
        bench = load_toml(place, BenchRecipe)
        _check(bench, place, folder)
        return LoadedBench(recipe=bench, published=load_published(folder), folder=where)
    recipe = load_toml(place, Recipe)
    _check(recipe, place, folder)
    return LoadedRecipe(recipe=recipe, published=load_published(folder), folder=where)


def _names(root: Path, name: str, folder: Path) -> bool:
    path = Path(name)
    here = path if path.is_absolute() else root / path
    return len(path.parts) == 1 or here.resolve() == folder.resolve() or path.resolve() == folder.resolve()


def _check(recipe: Recipe | BenchRecipe, place: Path, folder: Path) -> None:
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
    carriers = {path.parents[1].name: path for path in folder.parent.glob("*/kernels/src")}
    for carrier in recipe.kernels:
        demand("kernels", carrier, carriers)
    files = {"script": recipe.script}
    if isinstance(recipe, BenchRecipe):
        for name, size in recipe.scales.items():
            for case in size.cases:
                demand(f"scales.{name}.cases", case, recipe.cases)
    else:
        files |= {"baseline": recipe.baseline} if recipe.baseline else {}
        demand("training.model", recipe.training.model, recipe.models)
        demand("training.data", recipe.training.data, recipe.data)
        for name, scale in recipe.scales.items():
            for model in scale.models:
                demand(f"scales.{name}.models", model, recipe.models)
    for name in recipe.scales:
        demand(f"scales.{name}", name, dict.fromkeys(SCALES))
    for name in SCALES:
        demand("scales", name, dict(recipe.scales))
    for key, script in files.items():
        if not is_file_in(folder, script):
            raise InputError("no such file in the recipe's folder", place=f"{place}:{key}", found=script)
