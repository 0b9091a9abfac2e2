"""What every recipe.toml says, whatever it runs, and the sweeps that workloads share."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Generic, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import TypeVar

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.published import PublishedClaims
from twinrun.protocol.models.shape import Positive

SCALES = ("smoke", "node", "paper")
# Tables of recipe.toml that a workload reads: a type of its own, `Any` where every workload is served.
Tables = TypeVar("Tables", default=Any)


def _date(text: str) -> str:
    """Return a date as it stands; raises ValueError where it is none."""
    year, *rest = text.split("-")
    if text != "not stated":
        try:
            datetime.date.fromisoformat("-".join([year, *rest, *["01"] * (2 - len(rest))]))
        except ValueError:
            raise ValueError("expected a year, a month as 2023-10, a day, or `not stated`") from None
    return text


class Publication(Frozen):
    """What the recipe reproduces."""

    key: str
    """Short key that claims cite."""
    also: tuple[str, ...] = ()
    """Keys of further publications that claims cite, see the recipe's README."""
    title: str
    by: str
    published: Annotated[str, AfterValidator(_date)]
    """Date as far as known, ISO 8601, for example `2023-10`; else `not stated`."""
    figure: str


class Stacks(Frozen):
    """Stacks of images/stacks/ that the recipe runs in."""

    current: dict[str, str]
    """The stack for each vendor."""
    also: tuple[str, ...] = ()
    """Further stacks it runs in; the first built for the GPU is taken where the current one is not."""
    published: tuple[str, ...] = ()
    """Stacks with the software of the publication, of images/stacks/ or of the table of those not built."""


class Sweep(Frozen):
    """Placements of a scale; exactly one of the three ways to say it."""

    devices: tuple[Positive, ...] | Literal["powers-of-two"] | None = None
    """Devices of one machine; `powers-of-two` up to all the machine has."""
    nodes: tuple[Positive, ...] | None = None
    """Nodes of the published cluster."""
    devices_per_node: Positive | None = None
    """Devices, not cards, of one node."""
    layouts: tuple[str, ...] | None = None
    """Layouts of a training, on the devices of one node."""

    @model_validator(mode="after")
    def _one_way(self) -> Sweep:
        if [bool(self.devices), bool(self.nodes), bool(self.layouts)].count(True) != 1:
            raise ValueError("a sweep has either `devices`, `nodes` or `layouts`")
        if bool(self.devices_per_node) != bool(self.nodes) and not self.layouts:
            raise ValueError("`devices_per_node` goes with `nodes` or `layouts`, and only with them")
        return self

    def gives(self, size: str) -> bool:
        """Say whether `size`, for example `devices=4`, can be one of this sweep."""
        if self.layouts:
            return size in self.layouts
        name, _, text = size.partition("=")
        count = int(text) if text.isdecimal() and len(text) < 8 else 0
        if self.nodes:
            return name == "nodes" and count in self.nodes
        if self.devices == "powers-of-two":
            return name == "devices" and count > 0 and count & (count - 1) == 0
        return name == "devices" and count in (self.devices or ())


class Scale(Frozen):
    """One size at which a recipe runs; workloads add what they need."""

    summary: str
    set: dict[str, Any] = Field(default_factory=dict)
    """Fields of the workload's table that differ at this scale; dotted names reach into tables."""


class Recipe(Frozen):
    """The part of recipe.toml that is the same for every workload."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    version: Positive
    """Raised by every change that may move a number."""
    title: str
    question: Annotated[str, Field(pattern=r"^[^\n]+\?$")]
    """What a reader learns from a run, as one sentence with a question mark."""
    publication: Publication
    script: str | None = None
    """File of the recipe that every rank runs; a training without one is run by `twinrun.train.training`."""
    kernels: tuple[str, ...] = ()
    """Recipes whose kernels are used, this one or others."""
    stacks: Stacks


AnyScale = TypeVar("AnyScale", bound=Scale)


class Scales(Frozen, Generic[AnyScale]):
    """The three sizes."""

    smoke: AnyScale
    node: AnyScale
    paper: AnyScale


class ScaledTables(Frozen, Generic[AnyScale]):
    """Tables of recipe.toml of a workload, with its sizes."""

    scales: Scales[AnyScale]

    def scale(self, name: str) -> AnyScale:
        """Return the scale called `name`, one of `SCALES`."""
        return {"smoke": self.scales.smoke, "node": self.scales.node, "paper": self.scales.paper}[name]


class LoadedRecipe(Frozen, Generic[Tables]):
    """What stands in a recipe's folder."""

    recipe: Recipe
    workload: str
    """The table that says what is run."""
    tables: Tables
    """What the workload reads of recipe.toml."""
    published: PublishedClaims
    folder: str
    """Relative to the root; the whole path of a recipe that lies elsewhere."""
    units: dict[str, str] = Field(default_factory=dict)
    """Canonical unit of each metric, those that the recipe brings among them."""

    @property
    def elsewhere(self) -> bool:
        """Whether it lies outside the checkout."""
        return self.folder.startswith("/")

    @property
    def manifest(self) -> str:
        """Path of recipe.toml, relative to the root."""
        return f"{self.folder}/recipe.toml"

    def file(self, name: str) -> str:
        """Return the path of a file of the recipe, relative to the root."""
        return f"{self.folder}/{name}"


def summary(loaded: LoadedRecipe[Any]) -> dict[str, object]:
    """Return what a recipe asks and offers: its folder, question, publication, and what each scale runs."""
    recipe = loaded.recipe
    asked = {"recipe": loaded.folder, "question": recipe.question}
    asked["publication"] = f"{recipe.publication.title}, {recipe.publication.figure}"
    return asked | {"scales": {name: loaded.tables.scale(name).summary for name in SCALES}}
