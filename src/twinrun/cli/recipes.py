"""`twinrun recipes`: which recipes there are, what each asks, and what it would do on this machine."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from twinrun.cli.console import Shown, tell
from twinrun.foundation.cache import project_root, runs_folder
from twinrun.foundation.errors import TwinrunError
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.planning.project import Project
from twinrun.report.words import claims_in_words
from twinrun.results.reading import read_record
from twinrun.runs.selection import Request, select


def recipes() -> Shown:
    """List the recipes, what each asks, and what it would do on this machine; 2 where one is broken."""
    project = Project(project_root())
    rows, code = list[dict[str, object]](), 0
    for name in project.recipe_names:
        try:
            loaded = project.recipe(name)
        except TwinrunError as error:
            tell(error)
            code = error.exit_code
        else:
            rows.append(summary(loaded) | _here(project, loaded))
    # With `pad_edge=False` rich cuts a character off the last column.
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("recipe", "what it asks", "on this machine", "verdicts here"):
        table.add_column(head)
    for one in rows:
        cells = (Text(str(one[key])) for key in ("question", "here", "verdicts"))
        table.add_row(Text(str(one["recipe"]), no_wrap=True), *cells)
    hint = "\n`twinrun run RECIPE --dry` shows what a run would do; --json lists what each scale runs."
    return Shown(view=lambda: Group(table, hint), data=lambda: rows, code=code)


def summary(loaded: LoadedRecipe) -> dict[str, object]:
    """Return what a recipe asks and offers: its folder, question, publication, and what each scale runs."""
    recipe = loaded.recipe
    return {
        "recipe": loaded.folder,
        "question": recipe.question,
        "publication": f"{recipe.publication.title}, {recipe.publication.figure}",
        "scales": {name: loaded.tables.scale(name).summary for name in SCALES},
    }


def _here(project: Project, loaded: LoadedRecipe) -> dict[str, object]:
    """Return what `twinrun run` would choose on this machine or why it cannot, and the verdicts it has.

    Those are of the newest run of this machine, else of the newest committed record of its GPU.
    """
    gpu = ""
    try:
        selection = select(project, Request(recipe=loaded.folder))
    except TwinrunError as error:
        would = f"cannot run: {error.message}"
    else:
        chosen = {"time": "time not estimated"} | {choice.name: choice.value for choice in selection.choices}
        would = ", ".join(chosen[name] for name in ("scale", "model", "time") if name in chosen)
        gpu = selection.gpu.id if selection.gpu else "cpu"
    runs = sorted((runs_folder(project.root) / loaded.recipe.name).glob("*/record.json"))
    # Names of committed records: GPU and count, stack, date.
    alike = [file for file in project.results(loaded) if gpu and file.name.startswith(f"{gpu}x")]
    verdicts = "none"
    for newest in runs[-1:] or sorted(alike, key=lambda file: file.stem.split("_")[2])[-1:]:
        try:
            record = read_record(newest, project)
        except TwinrunError as error:
            verdicts = f"cannot be read: {error.message}"
        else:
            whose = "run here" if runs else "committed"
            verdicts = f"{claims_in_words(record.verdicts)}; {whose} {record.created[:10]}"
    return {"here": would, "verdicts": verdicts}
