"""Reports: one HTML file each, without scripts or anything to fetch, that opens from disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.text import number, plain, plural, visible
from twinrun.manifests.metrics import Metric
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.vendor import Gpu
from twinrun.report import summary, words
from twinrun.report.charts import Picture, draw
from twinrun.results.record import Record, hardware
from twinrun.results.verdicts import Verdict
from twinrun.workloads import load_workload
from twinrun.workloads.tables_and_charts import Chart, Table
from twinrun.workloads.workload import PictureContext


def write_report(
    path: Path, *, record: Record, recipe: LoadedRecipe, gpus: dict[str, Gpu], metrics: Mapping[str, Metric]
) -> None:
    """Write the report of one run.

    Args:
        record: with its verdicts.
        recipe: what it ran, which holds the published numbers.
        gpus: rows of images/gpus.toml, for the published hardware.
        metrics: rows of recipes/metrics.toml, for their titles.

    Raises:
        InputError: the record is of another recipe.
        MachineError: the file cannot be written.
    """
    _demand_recipe(record, recipe)
    _write(path, "run.html.j2", records=[record], drawn=[record], recipe=recipe, gpus=gpus, metrics=metrics)


def write_recipe_report(
    path: Path,
    *,
    records: Sequence[Record],
    recipe: LoadedRecipe,
    gpus: dict[str, Gpu],
    metrics: Mapping[str, Metric],
    between: Sequence[Verdict] = (),
) -> None:
    """Write one page over all `records` of a recipe, newest first; raises as `write_report` does.

    Args:
        between: verdicts on the claims between records, over those that are shown.
    """
    for record in records:
        _demand_recipe(record, recipe)
    newest = sorted(records, key=lambda record: record.created, reverse=True)
    _write(
        path,
        "recipe.html.j2",
        records=newest,
        drawn=summary.selected(newest),
        recipe=recipe,
        gpus=gpus,
        metrics=metrics,
        between=between,
    )


def excerpt(shown: Sequence[Record], recipe: LoadedRecipe, gpus: dict[str, Gpu]) -> str:
    """Return published and measured hardware side by side, a table and a picture, for a page of all."""
    first = charts(shown, recipe, gpus)[:1]
    named = [draw(chart.model_copy(update={"name": f"{recipe.recipe.name}-{chart.name}"})) for chart in first]
    sides = hardware_tables(shown, recipe, gpus)
    text = page_environment().get_template("excerpt.html.j2").render(hardware_tables=sides, pictures=named)
    # Markdown ends a block of HTML at an empty line.
    return "\n".join(line for line in text.splitlines() if line.strip())


def charts(records: Sequence[Record], recipe: LoadedRecipe, gpus: dict[str, Gpu]) -> list[Chart]:
    """Return what is drawn of one record, or of all of a recipe."""
    shown = [record.shown() for record in records]
    drawn = PictureContext(recipe=recipe, gpus=gpus)
    return list(load_workload(recipe.workload).overview(shown, drawn).charts)


def pictures(records: Sequence[Record], recipe: LoadedRecipe, gpus: dict[str, Gpu]) -> list[Picture]:
    """Return the pictures of one record, or of all of a recipe."""
    return [draw(chart) for chart in charts(records, recipe, gpus)]


def hardware_tables(
    records: Sequence[Record], recipe: LoadedRecipe, gpus: dict[str, Gpu]
) -> tuple[Table, ...]:
    """Return published and measured hardware side by side; those after the first table are folded."""
    shown = [record.shown() for record in records]
    drawn = PictureContext(recipe=recipe, gpus=gpus)
    return load_workload(recipe.workload).overview(shown, drawn).tables


def tables(record: Record) -> tuple[Table, ...]:
    """Return the measured numbers of a record."""
    return record.workload.show(record.shown()).tables


def subject(record: Record) -> str:
    """Return what a record is of."""
    return record.description.subject


def configuration(record: Record) -> tuple[tuple[str, dict[str, str]], ...]:
    """Return groups of what was asked for, each with its names and values."""
    return record.description.configuration


def counted(values: Sequence[str]) -> str:
    """Return the distinct `values`, each with how often it occurs."""
    return ", ".join(f"{count} x {value}" for value, count in Counter(values).items())


def _demand_recipe(record: Record, recipe: LoadedRecipe) -> None:
    if record.plan.recipe != recipe.recipe.name:
        raise InputError(
            "the record is of another recipe",
            place=record.run,
            found=record.plan.recipe,
            allowed=recipe.recipe.name,
            hint=f"write its report with recipes/{record.plan.recipe}",
        )


def _write(
    path: Path,
    template: str,
    *,
    records: Sequence[Record],
    drawn: Sequence[Record],
    recipe: LoadedRecipe,
    gpus: dict[str, Gpu],
    metrics: Mapping[str, Metric],
    between: Sequence[Verdict] = (),
) -> None:
    text = (
        page_environment()
        .get_template(template)
        .render(
            records=records,
            recipe=recipe.recipe,
            published=recipe.published,
            gpus=gpus,
            metrics=metrics,
            ranked=summary.ranked(records),
            anchors={
                record.run + record.sha256: f"record-{place}" for place, record in enumerate(records, 1)
            },
            hardware_tables=hardware_tables(drawn, recipe, gpus),
            between=between,
            pictures=pictures(drawn, recipe, gpus),
        )
    )
    write_atomically(path, text)


def _shown(value: object) -> object:
    """Return a value of a page; what a browser would obey in a text is written as its number."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def page_environment() -> Environment:
    """Return what renders pages: strict, and everything in them escaped."""
    # Names of devices and hosts come from elsewhere: everything is escaped, pictures excepted.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sizes: tuple[Any, ...] = (
        number,
        plain,
        plural,
        words.gib,
        words.quantity,
        words.published_value,
        words.published_neutral,
        words.measured_value,
        words.heading,
    )
    of_records: tuple[Any, ...] = (
        words.outcome,
        words.headline,
        words.claims_in_words,
        words.headline_of_all,
        words.tone,
        words.reason,
        words.departures,
        hardware,
        summary.software,
        summary.label,
        subject,
        configuration,
        tables,
    )
    of_points: tuple[Any, ...] = (
        summary.claims_of,
        summary.facts,
        summary.placements,
        summary.result,
        counted,
    )
    for function in (*sizes, *of_records, *of_points):
        environment.filters[function.__name__] = function
    return environment
