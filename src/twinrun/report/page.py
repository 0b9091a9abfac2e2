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
from twinrun.foundation.text import number, plain, plural, visible, without_credentials
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.report import summary, words
from twinrun.report.charts import draw
from twinrun.results.finished_run import FinishedRun
from twinrun.results.record import Record, hardware
from twinrun.results.verdicts import Verdict
from twinrun.workloads import load_workload
from twinrun.workloads.tables_and_charts import Table
from twinrun.workloads.workload import Overview, PictureContext


def write_report(path: Path, run: FinishedRun) -> Path:
    """Write the report of one run and return its path; raises MachineError where it cannot be written."""
    return _write(path, "run.html.j2", [run.record], run.overview, recipe=run.recipe, project=run.project)


def write_recipe_report(
    path: Path,
    *,
    records: Sequence[Record],
    recipe: LoadedRecipe,
    project: Project,
    between: Sequence[Verdict] = (),
    links: Mapping[str, str] | None = None,
) -> Path:
    """Write one page over all `records` of a recipe, newest first, and return its path.

    Args:
        between: verdicts on the claims between records, over those that are shown.
        links: titles and addresses of pages that stand beside it on a site.

    Raises:
        InputError: a record is of another recipe.
        MachineError: the file cannot be written.
    """
    for record in records:
        _demand_recipe(record, recipe)
    newest = sorted(records, key=lambda record: record.created, reverse=True)
    drawn = overview(summary.selected(newest), recipe, project.gpus)
    beside = {"links": links or {}, "ways": ways_to_run(recipe, project)}
    return _write(
        path, "recipe.html.j2", newest, drawn, recipe=recipe, project=project, between=between, **beside
    )


def ways_to_run(recipe: LoadedRecipe, project: Project) -> dict[str, tuple[str, ...]]:
    """Return the commands that run a recipe, by the kind of machine."""
    run = f"invoke run {recipe.folder}"
    ways = {vendor.title: (f"{run} --vendor {name}",) for name, vendor in project.vendors.items()}
    published = (f"{run} --scale paper --dry", f"{run} --scale paper")
    return ways | {"As published": published, "Slurm": (f"{run} --scheduler slurm --cluster NAME",)}


def overview(records: Sequence[Record], recipe: LoadedRecipe, gpus: dict[str, Gpu]) -> Overview:
    """Return what all `records` of a recipe show beside what was published."""
    drawn = PictureContext(recipe=recipe, gpus=gpus)
    return load_workload(recipe.workload).overview([record.shown() for record in records], drawn)


def tables(record: Record) -> tuple[Table, ...]:
    """Return the measured numbers of a record."""
    return record.workload.show(record.shown())


def subject(record: Record) -> str:
    """Return what a record is of."""
    return record.description.subject


def configuration(record: Record) -> tuple[tuple[str, dict[str, str]], ...]:
    """Return groups of what was asked for, each with its names and values."""
    return record.description.configuration


def with_counts(values: Sequence[str]) -> str:
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
    records: Sequence[Record],
    drawn: Overview,
    *,
    recipe: LoadedRecipe,
    project: Project,
    between: Sequence[Verdict] = (),
    **beside: object,
) -> Path:
    anchors = {record.run + record.sha256: f"record-{number}" for number, record in enumerate(records, 1)}
    page = page_environment().get_template(template)
    write_atomically(
        path,
        page.render(
            records=records,
            recipe=recipe.recipe,
            published=recipe.published,
            gpus=project.gpus,
            metrics=project.metrics,
            ranked=summary.ranked(records),
            anchors=anchors,
            hardware_tables=drawn.tables,
            between=between,
            pictures=[draw(chart) for chart in drawn.charts],
            **beside,
        ),
    )
    return path


def _shown(value: object) -> object:
    """Return a value of a page: a text has no credential, and what a browser would obey as its number."""
    text = isinstance(value, str) and not isinstance(value, Markup)
    return visible(without_credentials(str(value))) if text else value


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
        words.tone_of,
        words.worst_first,
        words.reason,
        words.departures,
        words.shown_conditions,
        hardware,
        summary.software,
        summary.label,
        subject,
        configuration,
        tables,
    )
    of_points: tuple[Any, ...] = (
        summary.claims_of,
        summary.facts_of,
        summary.placement_table,
        summary.result,
        with_counts,
    )
    for function in (*sizes, *of_records, *of_points):
        environment.filters[function.__name__] = function
    return environment
