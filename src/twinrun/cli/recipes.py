"""`invoke recipes`: which recipes there are, what each asks, and what it would do on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from twinrun.cli.console import print_json
from twinrun.foundation.errors import TwinrunError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.terminal import say
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.planning.project import Project
from twinrun.report.terminal import show
from twinrun.report.words import claims_in_words
from twinrun.results.reading import read_record
from twinrun.runs.selection import Request, select


class RecipeSummary(Frozen):
    """A recipe for somebody who chooses one."""

    recipe: str
    """Folder of the recipe, as `invoke run` takes it."""
    question: str
    publication: str
    scales: dict[str, str]
    """What each scale runs."""


def summaries(project: Project) -> Iterator[RecipeSummary]:
    """Yield what each recipe of the project asks and offers; raises InputError for a broken one."""
    for loaded in project.recipes().values():
        yield summary(loaded)


def summary(loaded: LoadedRecipe) -> RecipeSummary:
    """Return what a recipe asks and offers."""
    recipe = loaded.recipe
    return RecipeSummary(
        recipe=loaded.folder,
        question=recipe.question,
        publication=f"{recipe.publication.title}, {recipe.publication.figure}",
        scales={name: loaded.tables.scale(name).summary for name in SCALES},
    )


def here(project: Project, recipe: str) -> tuple[str, str]:
    """Return what `invoke run` would choose on this machine or why it cannot, and the verdicts it has."""
    try:
        selection = select(project, Request(recipe=recipe))
    except TwinrunError as error:
        return f"cannot run: {error.message}", verdicts_here(project, project.recipe(recipe), "")
    chosen = {"time": "time not estimated"} | {choice.name: choice.value for choice in selection.choices}
    would = ", ".join(chosen[name] for name in ("scale", "model", "time") if name in chosen)
    gpu = selection.gpu.id if selection.gpu else "cpu"
    return would, verdicts_here(project, selection.recipe, gpu)


def verdicts_here(project: Project, loaded: LoadedRecipe, gpu: str) -> str:
    """Return the claims that the newest run of this machine decides, else the newest record of its GPU."""
    runs = sorted((project.root / "runs" / loaded.recipe.name).glob("*/record.json"))
    # Names of committed records: GPU and count, stack, date.
    alike = [file for file in project.results(loaded) if gpu and file.name.startswith(f"{gpu}x")]
    newest = runs[-1:] or sorted(alike, key=lambda file: file.stem.split("_")[2])[-1:]
    if not newest:
        return "none"
    try:
        record = read_record(newest[0], project)
    except TwinrunError as error:
        return f"cannot be read: {error.message}"
    whose = "run here" if runs else "committed"
    return f"{claims_in_words(record.verdicts)}; {whose} {record.created[:10]}"


def recipes(root: Path, *, as_json: bool) -> None:
    """Print a row for each recipe; the error of a broken one comes after those of all others."""
    project = Project(root)
    rows, broken = list[tuple[RecipeSummary, str, str]](), list[TwinrunError]()
    for name in project.recipe_names:
        try:
            one = summary(project.recipe(name))
        except TwinrunError as error:
            broken.append(error)
        else:
            rows.append((one, *here(project, one.recipe)))
    _print(rows, as_json=as_json)
    if broken:
        raise broken[0]


def _print(rows: Sequence[tuple[RecipeSummary, str, str]], *, as_json: bool) -> None:
    if as_json:
        print_json([one.model_dump() | {"here": text, "verdicts": found} for one, text, found in rows])
        return
    # With `pad_edge=False` rich cuts a character off the last column.
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("recipe", min_width=max((len(one.recipe) for one, _, _ in rows), default=0))
    for head in ("what it asks", "on this machine", "verdicts here"):
        table.add_column(head)
    for one, text, found in rows:
        table.add_row(Text(one.recipe, no_wrap=True), Text(one.question), Text(text), Text(found))
    show(table)
    say("\n`invoke run RECIPE --dry` shows what a run would do; --json lists what each scale runs.")
