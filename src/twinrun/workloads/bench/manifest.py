"""What a benchmark's recipe says beside what every recipe says, and the part of a plan that follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.recipe import SCALES, LoadedRecipe, Scale, ScaledTables, Sweep
from twinrun.protocol.bench import Label, Settings, Timing, possible_names

# Metrics of our calls alone, of baselines too, and of ours beside each baseline.
OF_OURS = ("bandwidth", "bandwidth-share", "bus-bandwidth", "roofline-time", "roofline-share", "link-traffic")
OF_BOTH, BESIDE = ("time", "error", "kept-memory"), ("speedup", "memory-saving")


class BenchScale(Scale):
    """One size at which the benchmark runs."""

    cases: tuple[str, ...]
    """Cases, in the order in which they run."""
    sweep: Sweep | None = None
    """Placements of each case; one device where there is none."""


class Figure(Frozen):
    """A picture of the benchmark: what is drawn over what."""

    kind: Literal["bars", "lines"]
    metric: str = "time"
    each: tuple[str, ...] = ()
    """Labels: one picture for each combination of their values."""
    series: tuple[str, ...] = ()
    """Labels whose values name a bar or a curve, beside the implementation."""
    over: str | None = None
    """Setting of the cases on the horizontal axis of lines, for example `bytes`."""
    where: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Labels and the values of them that are drawn; all where a label is left out."""
    cases: tuple[str, ...] = ()
    """Cases that bars are drawn of; those that claims name when left out."""

    @model_validator(mode="after")
    def _lines_over(self) -> Figure:
        if (self.kind == "lines") != (self.over is not None):
            raise ValueError('`over` goes with `kind = "lines"`, and only with it')
        return self


class BenchTables(ScaledTables[BenchScale]):
    """Tables of recipe.toml."""

    bench: Timing
    """How the publication measured, as far as it says."""
    at_least: dict[str, int | float] = Field(default_factory=dict)
    """The smallest value of options that are numbers."""
    label: tuple[Label, ...] = ()
    """What is timed at each case: names of calls are made of their values."""
    baselines: tuple[str, ...] = ()
    """Implementations that ours is timed beside."""
    allowed_errors: dict[str, dict[str, Annotated[float, Field(gt=0, lt=1)]]] = Field(default_factory=dict)
    """How far ours may be from its float64 reference, by values of labels; of several the last label's."""
    figure: tuple[Figure, ...] = ()
    cases: dict[str, Settings]
    """What the script is told at each case."""

    def allowed_error(self, labels: Mapping[str, str]) -> float | None:
        """Return how far a call with these labels may be from its reference; None where nobody says it."""
        by_label = (of[labels[name]] for name, of in self.allowed_errors.items() if labels.get(name) in of)
        return next(reversed([None, *by_label]))


class BenchPlan(Frozen):
    """What decides a benchmark."""

    bench: Timing
    labels: tuple[Label, ...] = ()


class BenchPoint(Frozen):
    """One case at one placement."""

    case: str
    settings: Settings
    """What its script is told."""


def check_names(recipe: LoadedRecipe[BenchTables]) -> None:
    """Hold the names inside recipe.toml against each other; raises InputError."""
    tables, place = recipe.tables, recipe.manifest
    numbers = {name: one for name, one in tables.bench.options.items() if type(one) in (int, float)}
    for option in tables.at_least:
        _demand(option, numbers, f"{place}:at_least")
    check_values(tables, tables.bench.options, f"{place}:bench.options.")
    for case, settings in tables.cases.items():
        check_values(tables, settings, f"{place}:cases.{case}.")
    for scale in SCALES:
        for case in tables.scale(scale).cases:
            _demand(case, tables.cases, f"{place}:scales.{scale}.cases")
    labels = {one.name: one for one in tables.label}
    for name, allowed in tables.allowed_errors.items():
        _demand(name, labels, f"{place}:allowed_errors")
        for value in allowed:
            _demand(value, labels[name].values, f"{place}:allowed_errors.{name}")
    for number, figure in enumerate(tables.figure):
        where = f"{place}:figure.{number}"
        for name in (*figure.each, *figure.series, *figure.where):
            _demand(name, labels, where)
        for name, values in figure.where.items():
            for value in values:
                _demand(value, labels[name].values, f"{where}.where.{name}")
        for case in figure.cases:
            _demand(case, tables.cases, f"{where}.cases")


def check_values(tables: BenchTables, options: Settings, place: str) -> None:
    """Hold lists such as `dtypes` against the label `dtype`, and numbers against their smallest value.

    Raises:
        InputError: a value is none of these; its place begins with `place`.
    """
    for name, least in tables.at_least.items():
        found = options.get(name, least)
        if isinstance(found, (int, float)) and found < least:
            raise InputError("too small", place=f"{place}{name}", found=found, allowed=f"{least} or more")
    for label in tables.label:
        values = options.get(f"{label.name}s")
        for value in values if isinstance(values, (tuple, list)) else ():
            _demand(str(value), label.values, f"{place}{label.name}s")


def _demand(name: str, allowed: object, place: str) -> None:
    choices = [str(one) for one in allowed] if isinstance(allowed, (dict, tuple)) else []
    require_known(name, choices, "no such name", place=place)


def measurement_ids(tables: BenchTables, metric: str) -> set[str] | None:
    """Return the identifiers that measurements of `metric` can have; None where they have no metric such."""
    if metric == "peak-memory":
        return {metric}
    if metric not in (*OF_OURS, *OF_BOTH, *BESIDE):
        return None
    names = {name for name in possible_names(tables.label) if name}
    own = {name if metric == "time" else f"{name}/{metric}" for name in names}
    beside = {f"{name}@{other}" for name in own for other in tables.baselines}
    return own if metric in OF_OURS else beside if metric in BESIDE else own | beside
