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
from twinrun.foundation.text import visible, without_credentials
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.report import summary, words
from twinrun.report.charts import draw
from twinrun.report.picture import Picture
from twinrun.results.finished_run import FinishedRun
from twinrun.results.judged import Judged
from twinrun.results.verdicts import Verdict
from twinrun.workloads import load_workload
from twinrun.workloads.tables_and_charts import Bar, BarChart, BarKind, Chart, LineChart, Table
from twinrun.workloads.workload import Overview, PictureContext

# Subjects that the page of a recipe shows, and records that a page of the list has.
SUBJECTS, ROWS = 8, 24
# A record with more cells than this is shown in full on its own page alone.
CELLS = 600


def write_report(path: Path, run: FinishedRun) -> Path:
    """Write the report of one run and return its path; raises MachineError where it cannot be written."""
    return _write_run(
        path, run.record, run.record.overview, recipe=run.record.recipe, project=run.record.project, links={}
    )


def write_recipe_report(
    path: Path,
    *,
    records: Sequence[Judged],
    recipe: LoadedRecipe,
    project: Project,
    between: Sequence[Verdict] = (),
    links: Mapping[str, str] | None = None,
) -> Path:
    """Write the page of a recipe and, in the folder of its name, a page of each record and their list.

    The page shows the records that stand for the first subjects: it does not grow with `records`.

    Args:
        between: verdicts on the claims between records, over those that are shown.
        links: titles and addresses of pages that stand beside it on a site.

    Returns:
        The path of the page.

    Raises:
        InputError: a record is of another recipe.
        MachineError: a file cannot be written.
    """
    _demand_recipe(records, recipe)
    newest = sorted(records, key=lambda record: record.created, reverse=True)
    ranked = summary.ranked(newest)
    standing = [one.shown for one in ranked if one.shown]
    drawn = overview(standing[:SUBJECTS], recipe, project.gpus)
    # Counted from the oldest, so that a page keeps its address when a record is added.
    pages = {id(one): f"{path.stem}/{place}.html" for place, one in enumerate(reversed(newest), 1)}
    shared = {"records": newest, "recipe": recipe.recipe, "metrics": project.metrics, "ranked": ranked}
    pictures = _pictures(drawn, between)
    opening = next(filter(summary.judged, standing), standing[0] if standing else None)
    render_page(
        path,
        "recipe.html.j2",
        **shared,
        published=recipe.published,
        gpus=project.gpus,
        opening=opening,
        points=_in_full(opening),
        shown=[one for one in ranked if one.shown][:SUBJECTS],
        pages=pages,
        hardware_tables=drawn.tables,
        between=between,
        lead=pictures[:1],
        pictures=pictures[1:],
        ways=ways_to_run(recipe, project),
        links=links or {},
    )
    back = {title: f"../{address}" for title, address in (links or {}).items()} | {
        recipe.recipe.title: f"../{path.name}",
        "All records": "records-1.html",
    }
    for record in newest:
        place = path.parent / pages[id(record)]
        _write_run(place, record, Overview(), recipe=recipe, project=project, links=back)
    _write_list(path, ranked, pages=pages, shared=shared, links=back)
    return path


def _in_full(record: Judged | None) -> tuple[Table, ...]:
    """Return the tables of a record, none where they are too large for the page of its recipe."""
    found = tables(record) if record else ()
    return found if sum(len(one.rows) * len(one.columns) for one in found) <= CELLS else ()


def _write_list(
    path: Path,
    ranked: Sequence[summary.SubjectRecords],
    *,
    pages: Mapping[int, str],
    shared: Mapping[str, object],
    links: Mapping[str, str],
) -> None:
    """Write the list of all records, so many a page, in the order of hardware and subjects."""
    every = [(one, record) for one in ranked for record in (*filter(None, [one.shown]), *one.others)]
    names = {id(record): Path(pages[id(record)]).name for _, record in every}
    parts = [every[start : start + ROWS] for start in range(0, len(every), ROWS)]
    for number_, rows in enumerate(parts, 1):
        place = path.with_suffix("") / f"records-{number_}.html"
        about = {"rows": rows, "number": number_, "count": len(parts), "pages": names, "links": links}
        render_page(place, "records.html.j2", **shared, **about)


def _pictures(drawn: Overview, between: Sequence[Verdict]) -> list[Picture]:
    """Return the pictures of a page, first the one that has most to say of what was published."""
    charts = sorted(drawn.charts, key=lambda one: not _has_published(one))
    if between and not any(map(_has_published, charts)):
        charts.insert(0, ratio_chart(between))
    return [draw(one) for one in charts]


def _has_published(chart: Chart) -> bool:
    shown = (
        chart.curves if isinstance(chart, LineChart) else chart.bars if isinstance(chart, BarChart) else ()
    )
    return any(one.kind == "published" for one in shown)


def ratio_chart(verdicts: Sequence[Verdict]) -> BarChart:
    """Return the published ratios between two records beside those found here."""
    bars = list[Bar]()
    for one in verdicts:
        found = one.neutral if one.neutral and one.neutral.measured is not None else one
        values: dict[BarKind, float | None] = {"published": found.published, "measured": found.measured}
        bars += [
            Bar(label=one.statement, kind=kind, value=value, low=value, high=value, detail="")
            for kind, value in values.items()
            if value
        ]
    absent = "" if any(bar.kind == "measured" for bar in bars) else " No two records here decide one of them."
    return BarChart(
        name="ratios",
        title="One machine over another, as published and as found here",
        unit="times as fast",
        better="higher",
        bars=tuple(bars),
        notes=(f"Each bar is the ratio of two speeds; below one the first is slower.{absent}",),
    )


def ways_to_run(recipe: LoadedRecipe, project: Project) -> dict[str, tuple[str, ...]]:
    """Return the commands that run a recipe, by the kind of machine."""
    run = f"invoke run {recipe.folder}"
    ways = {vendor.title: (f"{run} --vendor {name}",) for name, vendor in project.vendors.items()}
    published = (f"{run} --scale paper --dry", f"{run} --scale paper")
    return ways | {"As published": published, "Slurm": (f"{run} --scheduler slurm --cluster NAME",)}


def overview(records: Sequence[Judged], recipe: LoadedRecipe, gpus: dict[str, Gpu]) -> Overview:
    """Return what all `records` of a recipe show beside what was published."""
    drawn = PictureContext(recipe=recipe, gpus=gpus)
    return load_workload(recipe.workload).overview([record.view for record in records], drawn)


def tables(record: Judged) -> tuple[Table, ...]:
    """Return the measured numbers of a record."""
    return record.workload.show(record.view)


def with_counts(values: Sequence[str]) -> str:
    """Return the distinct `values`, each with how often it occurs."""
    return ", ".join(f"{count} x {value}" for value, count in Counter(values).items())


def _demand_recipe(records: Sequence[Judged], recipe: LoadedRecipe) -> None:
    for record in records:
        require_equal(
            record.plan.recipe,
            recipe.recipe.name,
            "the record is of another recipe",
            place=record.run,
            hint=f"write its report with recipes/{record.plan.recipe}",
        )


def _write_run(
    path: Path,
    record: Judged,
    drawn: Overview,
    *,
    recipe: LoadedRecipe,
    project: Project,
    links: Mapping[str, str],
) -> Path:
    pictures = _pictures(drawn, ())
    return render_page(
        path,
        "run.html.j2",
        record=record,
        recipe=recipe.recipe,
        published=recipe.published,
        gpus=project.gpus,
        lead=pictures[:1],
        pictures=pictures[1:],
        links=links,
    )


def render_page(path: Path, template: str, **content: object) -> Path:
    """Write a page and return its path; raises MachineError where it cannot be written."""
    write_atomically(path, page_environment().get_template(template).render(**content))
    return path


def _shown(value: object) -> object:
    """Return a value of a page: a text has no credential, and what a browser would obey as its number."""
    plain = isinstance(value, str) and not isinstance(value, Markup)
    return visible(without_credentials(str(value))) if plain else value


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
    for module in (text, words, summary):
        environment.filters |= dict(inspect.getmembers(module, inspect.isfunction))
    environment.filters |= {"id": id, "tables": tables, "with_counts": with_counts}
    return environment
