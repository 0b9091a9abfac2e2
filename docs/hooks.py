"""Makes pages of what code, manifests and records say, and fills `<!-- generated: ... -->` in others."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from invoke.loader import FilesystemLoader
from mkdocs.structure.files import File

from tools.schemas import page_of, schemas
from twinrun.cli.program import COMMANDS, app, arguments, usage
from twinrun.foundation.text import markdown_table, plural
from twinrun.images.inventory import committed_inventory
from twinrun.manifests.recipe import summary
from twinrun.manifests.stack import find_stacks
from twinrun.planning.project import Project
from twinrun.report.hardware import ModelChoices, choices, hardware_excerpt, model_page
from twinrun.report.page import write_recipe_report
from twinrun.report.site import documents, headline_picture, predictions, publication_page, publication_rows
from twinrun.report.words import headline, headline_of_all, selected, software
from twinrun.results.judge import judge_between
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record

ROOT = Path(__file__).resolve().parents[1]
PROJECT = Project(ROOT)
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
MANIFESTS = ("recipe", "published", "metrics", "stack", "vendor", "gpus", "cluster")
# Where a recipe's page leads, seen from the folder of results.
LINKS = {
    "twinrun": "../index.html",
    "All results": "index.html",
    "Which hardware": "hardware/index.html",
    "Statements": "statements/index.html",
    "How to read a verdict": "../guides/read-a-verdict/index.html",
}
RESULTS = """# What came out of each recipe?

A line is one record: the newest with the most points, made from a clean commit and in a stack named after the
PyTorch that ran. `as sent in` marks a record that others made.
"""
STATEMENTS = """# What do the publications say, and what holds it?

The page of a publication shows its claims as published, as measured here and as predicted. Below stand the
statements that no claim holds, with what holds them instead, or why nothing does.
"""


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages that are made: results, publications, models, keys of files, their schemas, a palette."""
    for name, content in made():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks of a page."""
    parts: dict[str, Callable[[], str]] = {
        "commands": commands,
        "hardware": lambda: hardware_excerpt(hardware_choices()),
        "headline": lambda: headline_picture(choices(PROJECT, list(standing()))),
        "predictions": predictions,
        "recipes": recipes,
        "stacks": stacks,
        "trials": trials,
    }
    return MARK.sub(lambda mark: parts[mark[1]](), markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Write the reports of all recipes that have records."""
    results = Path(config["site_dir"]) / "results"
    for name, loaded in PROJECT.recipes().items():
        if records := committed(name):
            between = judge_between(selected(records))
            page = results / f"{name}.html"
            write_recipe_report(
                page, records=records, recipe=loaded, project=PROJECT, between=between, links=LINKS
            )


def made() -> Iterator[tuple[str, str]]:
    """Yield each page, or file of the site, that is made, with its text."""
    yield "stylesheets/palette.css", (ROOT / "src/twinrun/report/palette.css").read_text(encoding="utf-8")
    yield "reference/manifests.md", page_of("Keys of manifests", *MANIFESTS)
    yield "reference/record.md", page_of("Keys of a record", "record")
    yield from ((f"reference/schemas/{name}", text) for name, text in schemas().items())
    yield from ((f"results/hardware/{one.name}.md", model_page(one)) for one in hardware_choices())
    yield "results/index.md", "\n\n".join([RESULTS, *map(result, PROJECT.recipes())])
    titles = documents(PROJECT)
    links = (f"- [{title}](publications/{key}.md)" for key, title in titles.items())
    yield "results/statements.md", "\n".join([STATEMENTS, *links])
    yield from ((f"results/publications/{key}.md", publication(key, title)) for key, title in titles.items())


def result(name: str) -> str:
    """Return what the records of a recipe say, a line a record, with the link to its page."""
    recipe = PROJECT.recipe(name).recipe
    origin = (
        f"Published in “{recipe.publication.title}” ({recipe.publication.figure}) by {recipe.publication.by}."
    )
    parts = [f"## {recipe.title}", f"{recipe.question} {origin}"]
    shown = selected(committed(name))
    if not shown:
        return "\n\n".join([*parts, "No record is committed yet."])
    rows = [(headline(one), one.description.subject, software(one)) for one in shown]
    if between := judge_between(shown):
        rows.append((headline_of_all(shown, between), "between records", ""))
    table = markdown_table(("what it says", "subject", "software"), rows)
    return "\n\n".join([*parts, table, f'<a href="{name}.html">Every claim and every record</a>'])


def publication(key: str, title: str) -> str:
    """Return the page of a publication: its claims in a picture and tables, and its other statements."""
    verdicts = {}
    for name in PROJECT.recipes():
        shown = [one for one in selected(committed(name)) if one.plan.scale != "smoke"]
        verdicts[name] = [*(two for one in shown for two in one.verdicts), *judge_between(shown)]
    rows = publication_rows(key, PROJECT, verdicts)
    judged = sum(row.judged for row in rows)
    said = f"{plural(len(rows), 'claim')}, {judged} judged by a record."
    parts = [f"# {title}", said, "## Claims", publication_page(key, title, rows)]
    if others := [
        (one["where"], one["statement"], one["held by"]) for one in statements() if one["publication"] == key
    ]:
        parts += ["## Other statements", markdown_table(("where", "statement", "held by"), others)]
    return "\n\n".join(parts) + "\n"


@cache
def statements() -> tuple[dict[str, str], ...]:
    """Return the statements that no claim holds, from `statements.csv`."""
    with (ROOT / "docs/statements.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def commands() -> str:
    """Return every command with its options, as `twinrun COMMAND --help` has them."""
    parts = []
    for name in sorted(COMMANDS):
        rows = [(f"`{' '.join(one.names)}`", one.parameter.help or "") for one in arguments(name)]
        said = app[name].help.partition("Args:")[0].strip()
        parts += [f"## {name}", said, f"`{usage(name)}`"]
        parts += [markdown_table(("option", "meaning"), rows)] if rows else []
    return "\n\n".join(parts)


def recipes() -> str:
    """Return what each recipe asks, and its smallest and largest scale."""
    heads = ("recipe", "what it asks", "on a CPU", "as published")
    found = [(summary(one), one.tables.scale) for one in PROJECT.recipes().values()]
    rows = [
        (f"`{one['recipe']}`", str(one["question"]), scale("smoke").summary, scale("paper").summary)
        for one, scale in found
    ]
    return markdown_table(heads, rows)


def stacks() -> str:
    """Return a row for each stack of images/stacks/."""
    rows = [
        (
            f"`{name}`",
            one.stack.vendor,
            one.stack.title,
            ", ".join(one.stack.archs) or "-",
            "built" if committed_inventory(ROOT, one) else "not built",
        )
        for name, one in find_stacks(ROOT).items()
    ]
    return markdown_table(("stack", "vendor", "what it is", "kernels for", "image"), rows)


def trials() -> str:
    """Return how often each fault is tried, and the rate of failures that this excludes."""
    module, _ = FilesystemLoader(start=str(ROOT / "tests")).load("trials")
    rows = [
        (
            one.fault,
            one.promise,
            f"{one.change} / {one.nightly}",
            f"{module.bound(one.change):.2g} / {module.bound(one.nightly):.2g}",
        )
        for one in module.ALL
    ]
    return markdown_table(("fault", "promise", "trials of a change / a night", "95 % bound"), rows)


@cache
def hardware_choices() -> tuple[ModelChoices, ...]:
    """Return what is known and predicted of every model, over all committed records."""
    return tuple(choices(PROJECT, all_committed()))


def standing() -> Iterable[Judged]:
    """Yield the records that stand for their subjects."""
    return (one for name in PROJECT.recipes() for one in selected(committed(name)))


def all_committed() -> list[Judged]:
    """Return the records of all recipes."""
    return [one for name in PROJECT.recipes() for one in committed(name)]


@cache
def committed(name: str) -> tuple[Judged, ...]:
    """Return the records of a recipe's results folder."""
    return tuple(read_record(file, PROJECT) for file in PROJECT.results(PROJECT.recipe(name)))
