"""The project's manifests, each read once: a file that is edited during a run changes nothing of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from twinrun.foundation.errors import InputError, closest, require_equal, require_known
from twinrun.foundation.files import is_file_in, real
from twinrun.foundation.manifest import read_toml, validate
from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.manifests.cluster import known_gpus
from twinrun.manifests.metrics import Metric, load_metrics
from twinrun.manifests.numbers import check_numbers, check_sources
from twinrun.manifests.published import PublishedClaims, load_published
from twinrun.manifests.recipe import LoadedRecipe, Recipe
from twinrun.manifests.stack import LoadedStack, load_stack
from twinrun.manifests.vendor import Gpu, Vendor, load_vendors
from twinrun.workloads import load_workload, workload_names
from twinrun.workloads.workload import Demand, Workload

# Folders of recipes outside the checkout, in the environment.
LISTED = "TWINRUN_RECIPES"


class Project:
    """A checkout: recipes, stacks, vendors, GPUs and metrics, read when first asked for and then kept."""

    def __init__(self, root: Path, *, signed: bool = False) -> None:
        self.root = root
        # Whether only records that a known signer has signed are read.
        self.signed = signed
        # Recipes outside the checkout, which are known by their folders.
        self._elsewhere: dict[str, Path] = {}
        self._recipes: dict[str, LoadedRecipe] = {}
        self._stacks: dict[str, LoadedStack] = {}

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """Rows of recipes/metrics.toml, and those that recipes bring."""
        return load_metrics(self.root, *self._elsewhere.values())

    @cached_property
    def gpus(self) -> dict[str, Gpu]:
        """Rows of images/gpus.toml."""
        return known_gpus(self.root)

    @cached_property
    def vendors(self) -> dict[str, Vendor]:
        """Folders of images/vendors."""
        return load_vendors(self.root)

    @cached_property
    def recipe_names(self) -> tuple[str, ...]:
        """Folders of recipes/; raises InputError where there is no such folder."""
        base = self.root / "recipes"
        if not base.is_dir():
            raise InputError("no such folder", place=str(base), hint="run twinrun from its checkout")
        return tuple(sorted(path.name for path in base.iterdir() if path.is_dir()))

    def recipes(self) -> dict[str, LoadedRecipe]:
        """Load every recipe; a broken one is an InputError, never skipped."""
        return {name: self.recipe(name) for name in self.recipe_names}

    def recipe(self, name: str) -> LoadedRecipe:
        """Load the recipe called `name`, or in the folder at that path, which may lie outside the checkout.

        A name is looked for in recipes/, then among the folders that the variable TWINRUN_RECIPES lists.

        Raises:
            InputError: no such recipe, two of one name, or a manifest that does not hold.
        """
        folder = self._folder(name)
        if folder.name not in self._recipes:
            self._recipes[folder.name] = self._load(folder)
        return self._recipes[folder.name]

    def stack(self, name: str) -> LoadedStack:
        """Load the stack called `name`; raises InputError."""
        if name not in self._stacks:
            self._stacks[name] = load_stack(self.root, name)
        return self._stacks[name]

    def results(self, recipe: LoadedRecipe) -> list[Path]:
        """Return the committed records of a recipe."""
        return sorted((self.root / recipe.folder / "results").glob("*.json"))

    def _folder(self, name: str) -> Path:
        given, own = Path(name), (self.root / "recipes").resolve()
        alone = len(given.parts) == 1
        listed = [Path(one) for one in os.environ.get(LISTED, "").split(os.pathsep) if one and alone]
        named = [one for one in (*self._elsewhere.values(), *listed) if one.name == name]
        places = [own / name, *named] if alone else [self.root / given]
        for folder in map(real, (*places, given)):
            if is_file_in(folder, "recipe.toml"):
                return own / folder.name if folder.parent == own else self._of_user(folder)
        if is_file_in(real(given.parent), given.name):
            raise InputError("a recipe is a folder", place=name, found="a file", hint=f"name {given.parent}")
        known = sorted(path.parent.name for path in own.glob("*/recipe.toml"))
        nearest = None if given.name == "recipes" else closest(given.name, known)
        hint, allowed = nearest or "`invoke recipes` says what each asks", [f"recipes/{one}" for one in known]
        raise InputError("unknown recipe", place=name, found=name, allowed=allowed, hint=hint)

    def _of_user(self, folder: Path) -> Path:
        """Return a folder outside the checkout, whose metrics count from now on; raises InputError."""
        others = [self.root / "recipes" / folder.name, self._elsewhere.get(folder.name, folder)]
        for other in others:
            if other != folder and is_file_in(other, "recipe.toml"):
                message, hint = "two recipes of one name", "rename the folder"
                raise InputError(message, place=str(folder), found=str(other), hint=hint)
        if folder.name not in self._elsewhere:
            self._elsewhere[folder.name] = folder
            self.__dict__.pop("metrics", None)
        return folder

    def _load(self, folder: Path) -> LoadedRecipe:
        place = folder / "recipe.toml"
        content = read_toml(place)
        workload = load_workload(_table_of(content, place))
        common = Recipe.model_fields.keys()
        own = {key: value for key, value in content.items() if key not in common}
        # First what is neither common nor of the workload: a misspelt key is unknown, not absent.
        tables = validate(own, workload.tables, place=str(place), also=common)
        loaded = LoadedRecipe(
            recipe=validate({key: content[key] for key in common & content.keys()}, Recipe, place=str(place)),
            workload=workload.table,
            tables=tables,
            published=load_published(folder),
            folder=os.fspath(folder.relative_to(self.root) if folder.is_relative_to(self.root) else folder),
            units={name: metric.unit for name, metric in self.metrics.items()},
        )
        self._check(loaded, workload, folder)
        return loaded

    def _check(self, loaded: LoadedRecipe, workload: Workload, folder: Path) -> None:
        """Hold a recipe against itself and what it names; raises InputError."""
        place, recipe = folder / "recipe.toml", loaded.recipe
        require_equal(recipe.name, folder.name, "no such name", place=f"{place}:name")
        for carrier in recipe.kernels:
            places = [*(self.root / "recipes").glob("*/kernels/src"), *folder.glob("kernels/src")]
            carriers = sorted({path.parents[1].name for path in places})
            require_known(carrier, carriers, "no such name", place=f"{place}:kernels")
        missing = f"a recipe with [{workload.table}] needs a script" if workload.module is None else ""
        if recipe.script is not None:
            missing = "" if is_file_in(folder, recipe.script) else "no such file in the recipe's folder"
        if missing:
            raise InputError(missing, place=f"{place}:script", found=recipe.script)
        keys, published = (recipe.publication.key, *recipe.publication.also), folder / "published.toml"
        check_sources(loaded.published, keys, place=str(published))
        workload.check(loaded, list(self.demands(loaded.published, published)))
        self._check_sides(loaded.published, published)

    def _check_sides(self, published: PublishedClaims, place: Path) -> None:
        """Refuse the stack of a side that is not there, unless it is said why; raises InputError."""
        message = "a stack is either in images/stacks or named with a reason under `nowhere`"
        for number, claim in enumerate(published.between_records):
            built = sorted(path.parent.name for path in (self.root / "images/stacks").glob("*/stack.toml"))
            known = [*built, *published.nowhere]
            for name, side in (("over", claim.over), ("under", claim.under)):
                if side.stack and (side.stack in built) == (side.stack in published.nowhere):
                    where = f"{place}:between_records.{number}.{name}.stack"
                    raise InputError(message, place=where, found=side.stack, allowed=known)

    def demands(self, published: PublishedClaims, place: Path) -> Iterator[Demand]:
        """Yield what the claims and their restatements ask of the workload; raises InputError."""
        check_numbers(published, place=str(place), metrics=self.metrics, gpus=self.gpus)
        claims: list[tuple[str, Claim | RecordClaim]] = [
            *((f"claim.{number}", one) for number, one in enumerate(published.claim)),
            *((f"between_records.{number}", one) for number, one in enumerate(published.between_records)),
        ]
        for key, claim in claims:
            named = [("point", claim.point), *(("between", one) for one in claim.between or ())]
            asked: list[tuple[str, str | None, str, str | None]]
            asked = [(part, one, claim.metric, claim.measurement) for part, one in named if one is not None]
            asked = asked or [("metric", None, claim.metric, claim.measurement)]
            # A metric that is computed from several points is measured at none.
            if (here := claim.here) and not self.metrics[here.metric].computed:
                asked.append(("here.metric", claim.point, here.metric, here.measurement))
            for part, point, metric, measurement in asked:
                where = f"{place}:{key}.{part}"
                yield Demand(place=where, point=point, metric=metric, measurement=measurement)


def _table_of(content: dict[str, Any], place: Path) -> str:
    """Return which workload's table a recipe.toml has; raises InputError unless it is exactly one."""
    found = [name for name in workload_names() if name in content]
    if len(found) != 1:
        tables = [name for name, value in content.items() if isinstance(value, dict)]
        nearest = (hint for name in tables if (hint := closest(name, workload_names())))
        message = "a recipe has the table of exactly one workload"
        allowed = [f"[{name}]" for name in workload_names()]
        hint = None if found else next(nearest, None)
        raise InputError(message, place=str(place), found=found or "none", allowed=allowed, hint=hint)
    return found[0]
