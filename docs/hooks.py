"""Fills `<!-- generated: ... -->` in the pages with what the code, the manifests and the records say."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from invoke.collection import Collection
from invoke.loader import FilesystemLoader
from mkdocs.structure.files import File

from twinrun.cli.program import contexts, options, usage
from twinrun.cli.recipes import summaries
from twinrun.foundation.text import markdown_table, plural
from twinrun.images.inventory import committed_inventory, facts
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.stack import find_stacks
from twinrun.planning.project import Project
from twinrun.report.figures import figures
from twinrun.report.hardware import ModelChoices, choices, hardware_excerpt, model_page
from twinrun.report.headline_picture import draw_headline, headline_rows
from twinrun.report.kernels_page import kernels
from twinrun.report.page import write_recipe_report
from twinrun.report.predictions_page import predictions, write_picture
from twinrun.report.publication_picture import documents, draw_publication, publication_rows
from twinrun.report.summary import selected, software
from twinrun.report.words import (
    headline,
    headline_of_all,
    measured_value,
    outcome,
    published_neutral,
    published_value,
)
from twinrun.results.between import judge_between
from twinrun.results.reading import read_record
from twinrun.results.record import Record, hardware
from twinrun.results.verdicts import Verdict

ROOT = Path(__file__).resolve().parents[1]
PROJECT = Project(ROOT)
MARK = re.compile(r"^<!-- generated: (\w+) ?([\w.-]*) -->$", re.MULTILINE)

# A page folds its sections after so many words, but for short ones.
SHOWN_WORDS, FOLDED_WORDS = 700, 40
# Where a recipe's page leads, seen from the folder of results.
LINKS = {
    "twinrun": "../index.html",
    "All results": "index.html",
    "Which hardware": "hardware/index.html",
    "Statements": "statements/index.html",
    "How to read a verdict": "../guides/read-a-verdict/index.html",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks of a page."""
    parts: dict[str, Callable[[], str]] = {
        "commands": commands,
        "images": images,
        "hardware": lambda: hardware_excerpt(hardware_choices()),
        "headline": headline_figure,
        "kernels": lambda: kernels(of_kernels()),
        "publications": publications,
        "predictions": lambda: predictions(PROJECT, all_committed()),
        "recipes": recipes,
        "results": results,
        "stacks": stacks,
        "trials": trials,
    }
    named: dict[str, Callable[[str], str]] = {"publication": publication}
    return MARK.sub(lambda mark: named[mark[1]](mark[2]) if mark[2] else parts[mark[1]](), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Fold the sections of a page that come after so many words, so that no page is a scroll of screens."""
    if 'class="home"' in html:
        return html
    first, *others = re.split(r"(?=<h2[ >])", html)
    read, parts = words(first), [first]
    for section in others:
        heading, body = section.split("</h2>", 1)
        own = words(body)
        read += own
        folded = f"<details><summary>{plural(own, 'word')}</summary>{body}</details>"
        parts.append(f"{heading}</h2>{folded if read > SHOWN_WORDS and own > FOLDED_WORDS else body}")
    return "".join(parts)


def words(html: str) -> int:
    """Return how many words of a page are read without opening anything; lines and rows are a few words."""
    text = re.sub(r"</summary>.*?</details>", " ", html, flags=re.DOTALL)
    return len(re.sub(r"<[^>]*>", " ", text).split()) + 8 * text.count("<summary>") + 4 * text.count("<tr")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the palette of the reports, a page a model, and a page for each publication that has none."""
    palette = (ROOT / "src/twinrun/report/palette.css").read_text(encoding="utf-8")
    files.append(File.generated(config, "stylesheets/palette.css", content=palette))
    for one in hardware_choices():
        files.append(File.generated(config, f"results/hardware/{one.name}.md", content=model_page(one)))
    for key, title in documents(PROJECT).items():
        page = f"results/publications/{key}.md"
        if not (ROOT / "docs" / page).is_file():
            content = f"# {title}\n\n<!-- generated: publication {key} -->\n"
            files.append(File.generated(config, page, content=content))
    return files


def publications() -> str:
    """Return a list of the publications, each with its page."""
    return "\n".join(f"- [{title}](publications/{key}.md)" for key, title in documents(PROJECT).items())


def publication(key: str) -> str:
    """Return the picture of a publication: its numbers as published, as measured here and as predicted."""
    records = {name: selected(committed(one.recipe.name)) for name, one in PROJECT.recipes().items()}
    rows = publication_rows(key, PROJECT, records)
    judged = sum(bool(row.measured) for row in rows)
    said = f"{plural(len(rows), 'claim')}, {judged} of them judged by a record, on whatever GPU it is of."
    drawn = draw_publication(documents(PROJECT)[key], rows)
    return f'<figure class="publication">{drawn}<figcaption>{said} {ABOUT}</figcaption></figure>'


ABOUT = (
    "Values are multiples of the published one, and to the right is better; each record has a disc."
    " On other hardware than the published one, the multiple is of the claim's restatement."
)


@cache
def hardware_choices() -> tuple[ModelChoices, ...]:
    """Return what is known and predicted of every model, over all committed records."""
    return tuple(choices(PROJECT, all_committed()))


def headline_figure() -> str:
    """Return the picture of published against measured, which takes its colours from the page."""
    standing = [
        one for loaded in PROJECT.recipes().values() for one in selected(committed(loaded.recipe.name))
    ]
    return draw_headline(headline_rows(choices(PROJECT, standing)))


def on_post_build(config: Any, **_: Any) -> None:
    """Write the reports of all recipes that have records, and the picture of predictions."""
    write_picture(Path(config["site_dir"]) / "results" / "predictions.svg", PROJECT.gpus)
    for name, loaded in PROJECT.recipes().items():
        if records := committed(loaded.recipe.name):
            page = Path(config["site_dir"]) / "results" / f"{name}.html"
            write_recipe_report(
                page,
                records=records,
                recipe=loaded,
                project=PROJECT,
                between=judge_between(selected(records), PROJECT),
                links=LINKS,
            )


def commands() -> str:
    """Return every command with its options, as `invoke --help COMMAND` has them."""
    module, _ = FilesystemLoader(start=str(ROOT)).load("tasks")
    collection = Collection.from_module(module)
    parts = []
    for context in sorted(contexts(collection), key=lambda context: str(context.name)):
        rows = [(f"`{spelled}`", text) for spelled, text in options(context)]
        parts += [f"## {context.name}", str(collection[context.name].__doc__), f"`{usage(context)}`"]
        parts += (
            [closed(f"Options: {len(rows)}", markdown_table(("option", "meaning"), rows))] if rows else []
        )
    return "\n\n".join(parts)


def recipes() -> str:
    """Return what each recipe asks, and its smallest and largest scale."""
    heads = ("recipe", "what it asks", "on a CPU", "as published")
    return markdown_table(
        heads,
        [
            (f"`{one.recipe}`", one.question, one.scales["smoke"], one.scales["paper"])
            for one in summaries(PROJECT)
        ],
    )


def closed(title: str, text: str) -> str:
    """Return Markdown that a reader opens."""
    return f'<details markdown="1"><summary>{escape(title)}</summary>\n\n{text}\n\n</details>'


def trials() -> str:
    """Return how often each fault is tried, and the rate of failures that this excludes."""
    module, _ = FilesystemLoader(start=str(ROOT / "tests")).load("trials")
    rows = (
        (
            one.fault,
            one.promise,
            f"{one.change} / {one.nightly}",
            "every case" if one.seed is None else f"{one.seed} / {one.seed + 1}",
            f"{module.bound(one.change):.2g} / {module.bound(one.nightly):.2g}",
        )
        for one in module.ALL
    )
    return markdown_table(("fault", "promise", "trials of a change / of a night", "seed", "95 % bound"), rows)


def stacks() -> str:
    """Return a row for each stack of images/stacks/."""
    rows = (
        (f"`{name}`", one.stack.vendor, one.stack.title, ", ".join(one.unhashed(ROOT)) or "-")
        for name, one in find_stacks(ROOT).items()
    )
    return markdown_table(("stack", "vendor", "what it is", "unverified pins"), rows)


def images() -> str:
    """Return what is known of each stack's image, then what was measured in those that were built."""
    stacks = find_stacks(ROOT)
    built = {name: committed_inventory(ROOT, one) for name, one in stacks.items()}
    rows = (
        (
            f"`{name}`",
            ", ".join(one.stack.archs) or "-",
            f"[built](#{anchor(name)})" if built[name] else "not built",
            ", ".join(run_on_gpus(name)) or "no",
        )
        for name, one in stacks.items()
    )
    parts = [markdown_table(("stack", "built for", "image", "ran on a GPU"), rows)]
    for name, contents in built.items():
        if contents:
            own = f"Measured in `{contents.image}`, `{contents.digest}`."
            parts += [
                f"### {name} {{#{anchor(name)}}}",
                own,
                markdown_table(("what", "found"), facts(contents)),
            ]
    return "\n\n".join(parts)


def anchor(stack: str) -> str:
    """Return the name that links to a stack's contents have."""
    return f"contents-{stack.replace('.', '-')}"


def run_on_gpus(stack: str) -> list[str]:
    """Return the GPUs of committed records of a stack, and what the ranks ran in."""
    records = [
        record
        for loaded in PROJECT.recipes().values()
        for record in committed(loaded.recipe.name)
        if record.plan.stack == stack and record.machine.devices
    ]
    return sorted({f"{hardware(record)} ({ran_in(record)})" for record in records})


def ran_in(record: Record) -> str:
    """Return what the ranks of a record ran in: the image, or which PyTorch of an engine without one."""
    environment = record.environment
    if environment.image_digest:
        return "the image"
    kept = "as locked" if environment.as_locked else "not the lock's"
    return f"engine {record.plan.engine}, PyTorch {environment.libraries.get('torch', '?')}, {kept}"


def results() -> str:
    """Return the claims of every recipe beside what its committed records say of them."""
    with_records_first = sorted(PROJECT.recipes().items(), key=lambda one: not committed(one[1].recipe.name))
    return "\n\n".join(section(name, loaded) for name, loaded in with_records_first)


def of_kernels() -> dict[str, list[Record]]:
    """Return the records that the pages show of each recipe that carries kernels, by its title."""
    carriers = {path.parents[1].name for path in ROOT.glob("recipes/*/kernels/src")}
    return {
        loaded.recipe.title: list(selected(committed(loaded.recipe.name)))
        for loaded in PROJECT.recipes().values()
        if loaded.recipe.name in carriers
    }


def section(name: str, loaded: LoadedRecipe) -> str:
    """Return the results of one recipe: which hardware to choose, and what the record of each says."""
    recipe, records = loaded.recipe, committed(loaded.recipe.name)
    origin = f"{recipe.publication.figure} of “{recipe.publication.title}”, {recipe.publication.by}."
    link = f'<a href="{name}.html">Published beside measured, every claim and every record</a>'
    stands = selected(records)
    shown = [record_results(record) for record in stands if record.verdicts]
    if between := judge_between(stands, PROJECT):
        shown.append(folded(f"<strong>{escape(headline_of_all(stands, between))}</strong>", between))
    if not records:
        return "\n\n".join(
            [f"## {recipe.title}", f"`{loaded.folder}`: {origin}", "No record is committed yet."]
        )
    measured = closed("The figures of every point", figures(loaded.folder, PROJECT))
    return "\n\n".join([f"## {recipe.title}", f"`{loaded.folder}`: {origin}", *shown, measured, link])


def record_results(record: Record) -> str:
    """Return the sentence of a record, and its claims folded below."""
    subject = record.description.subject
    said = f"<strong>{escape(headline(record))}</strong> {escape(subject)}, {escape(software(record))}"
    return folded(said, record.verdicts)


def folded(said: str, verdicts: Sequence[Verdict]) -> str:
    """Return a sentence, HTML, with a row for each verdict below it."""
    rows = "".join(
        f"<tr><th>{escape(one.statement)}</th>{''.join(map(cell, cells(one)))}</tr>" for one in verdicts
    )
    heads = "".join(f"<th>{head}</th>" for head in ("claim", *CELLS))
    table = f'<table class="verdicts"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return f"<details><summary>{said}</summary>{table}</details>"


CELLS = ("published", "here", "verdict", "why")


def cells(verdict: Verdict) -> list[tuple[str, str]]:
    """Return the cells of a verdict, each with the title of its column."""
    published = ", ".join(filter(None, (published_value(verdict), published_neutral(verdict))))
    texts = (published, measured_value(verdict), outcome(verdict), verdict.why)
    return list(zip(CELLS, texts, strict=True))


def cell(content: tuple[str, str]) -> str:
    """Return a cell that a narrow screen labels with its column."""
    return f'<td data-label="{content[0]}">{escape(content[1])}</td>'


def all_committed() -> list[Record]:
    """Return the records of all recipes."""
    return [one for loaded in PROJECT.recipes().values() for one in committed(loaded.recipe.name)]


@cache
def committed(name: str) -> tuple[Record, ...]:
    """Return the records of a recipe's results folder."""
    return tuple(read_record(file, PROJECT) for file in PROJECT.results(PROJECT.recipe(name)))
