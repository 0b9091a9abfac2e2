"""Reports: HTML without scripts or anything to fetch, that opens from disk."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from twinrun.foundation import text
from twinrun.foundation.errors import require_equal
from twinrun.foundation.files import write_atomically
from twinrun.foundation.redaction import leaving
from twinrun.foundation.text import visible
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.project import Project
from twinrun.report import words
from twinrun.report.charts import draw
from twinrun.report.picture import Picture
from twinrun.results.judged import Judged, hardware
from twinrun.results.reading import FinishedRun, confirmed_by
from twinrun.results.verdicts import HOLDS, Verdict
from twinrun.workloads import load_workload
from twinrun.workloads.tables_and_charts import Chart, RowChart, Table
from twinrun.workloads.workload import Overview, PictureContext

# Subjects that the page of a recipe draws.
SUBJECTS = 8


def write_report(path: Path, run: FinishedRun) -> Path:
    """Write the report of one run and return its path; raises MachineError where it cannot be written."""
    record = run.record
    return _write_run(path, record, overview([record], record.recipe, record.project), links={})


def write_recipe_report(
    path: Path,
    *,
    records: Sequence[Judged],
    recipe: LoadedRecipe,
    project: Project,
    between: Sequence[Verdict] = (),
    links: Mapping[str, str] | None = None,
) -> Path:
    """Write the page of a recipe and, in the folder of its name, a page of each record.

    Args:
        between: verdicts on the claims between records, over those that are shown.
        links: titles and addresses of pages that stand beside it on a site.

    Returns:
        The path of the page.

    Raises:
        InputError: a record is of another recipe.
        MachineError: a file cannot be written.
    """
    for record in records:
        place, hint = record.run, f"write its report with recipes/{record.plan.recipe}"
        message = "the record is of another recipe"
        require_equal(record.plan.recipe, recipe.recipe.name, message, place=place, hint=hint)
    ranked = words.ranked(records)
    standing = [one.shown for one in ranked if one.shown]
    drawn = overview(standing[:SUBJECTS], recipe, project)
    # Counted from the oldest, so that a page keeps its address when a record is added.
    oldest = sorted(records, key=lambda record: record.created)
    pages = {id(one): f"{path.stem}/{place}.html" for place, one in enumerate(oldest, 1)}
    opening = next(filter(words.decided, standing), standing[0] if standing else None)
    told: dict[str, object] = {"loaded": recipe, "project": project, "between": between, "opening": opening}
    told |= {"ranked": ranked, "records": records, "pages": pages, "pictures": _pictures(drawn)}
    render_page(path, "recipe.html.j2", links=links or {}, **told)
    back = {title: f"../{address}" for title, address in (links or {}).items()}
    for record in records:
        shown = back | {recipe.recipe.title: f"../{path.name}"}
        _write_run(path.parent / pages[id(record)], record, Overview(), links=shown)
    return path


def _pictures(drawn: Overview) -> list[Picture]:
    """Return the pictures of a page, first the one that has most to say of what was published."""
    return [draw(one) for one in sorted(drawn.charts, key=lambda one: not _has_published(one))]


def _has_published(chart: Chart) -> bool:
    rows = chart.rows if isinstance(chart, RowChart) else ()
    shown = [*(mark for row in rows for mark in row.marks), *getattr(chart, "curves", ())]
    return any(one.kind == "published" for one in shown)


def ways_to_run(recipe: LoadedRecipe, project: Project) -> dict[str, tuple[str, ...]]:
    """Return the commands that run a recipe, by the kind of machine."""
    run = f"invoke run {recipe.folder}"
    ways = {vendor.title: (f"{run} --vendor {name}",) for name, vendor in project.vendors.items()}
    published = (f"{run} --scale paper --dry", f"{run} --scale paper")
    return ways | {"As published": published, "Slurm": (f"{run} --scheduler slurm --cluster NAME",)}


def overview(records: Sequence[Judged], recipe: LoadedRecipe, project: Project) -> Overview:
    """Return what all `records` of a recipe show beside what was published."""
    drawn = PictureContext(recipe=recipe, gpus=project.gpus)
    return load_workload(recipe.workload).overview([record.view for record in records], drawn)


def tables(record: Judged) -> tuple[Table, ...]:
    """Return the measured numbers of a record."""
    return record.workload.show(record.view)


def with_counts(values: Sequence[str]) -> str:
    """Return the distinct `values`, each with how often it occurs."""
    return ", ".join(f"{count} x {value}" for value, count in Counter(values).items())


def _write_run(path: Path, record: Judged, drawn: Overview, *, links: Mapping[str, str]) -> Path:
    loaded = record.recipe
    shown = {"recipe": loaded.recipe, "published": loaded.published, "gpus": record.project.gpus}
    return render_page(path, "run.html.j2", record=record, pictures=_pictures(drawn), links=links, **shown)


def render_page(path: Path, template: str, **content: object) -> Path:
    """Write a page and return its path; raises MachineError where it cannot be written."""
    write_atomically(path, page_environment().get_template(template).render(**content))
    return path


def figure_text(picture: Picture) -> str:
    """Return a picture with what stands under it, as a block of HTML that Markdown leaves alone."""
    source = '{% import "parts.html.j2" as parts %}{{ parts.figure(picture) }}'
    written = page_environment().from_string(source).render(picture=picture)
    # Markdown ends a block of HTML at an empty line.
    return "\n".join(line for line in written.splitlines() if line.strip())


def _shown(value: object) -> object:
    """Return a value of a page: a text has no credential, and what a browser would obey as its number."""
    plain = isinstance(value, str) and not isinstance(value, Markup)
    return visible(leaving(str(value))) if plain else value


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
    # Every function of texts, words and summaries is a filter by its name.
    for module in (text, words):
        environment.filters |= dict(inspect.getmembers(module, inspect.isfunction))
    named = (id, tables, with_counts, ways_to_run, hardware, confirmed_by)
    environment.filters |= {one.__name__: one for one in named}
    environment.globals["HOLDS"] = HOLDS
    return environment
