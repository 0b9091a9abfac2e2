"""`invoke report`: the page, crate or submission of records, and which hardware to choose."""

from __future__ import annotations

import sys
from pathlib import Path

from twinrun.cli.console import demand_without
from twinrun.export.ro_crate import write_crate
from twinrun.foundation.errors import InputError, closest
from twinrun.foundation.signatures import is_demanded
from twinrun.foundation.terminal import say
from twinrun.planning.project import Project
from twinrun.protocol.models import member
from twinrun.report.form import send
from twinrun.report.hardware import choices, prices_of, write_hardware_page
from twinrun.report.page import write_recipe_report, write_report
from twinrun.report.summary import selected
from twinrun.report.tables import condition_table
from twinrun.report.terminal import show
from twinrun.report.words import headline, outcome
from twinrun.results.between import judge_between
from twinrun.results.finished_run import read_run
from twinrun.results.reading import read_record
from twinrun.results.record import Record
from twinrun.results.submission import FILE, add_submission


def report(
    root: Path,
    what: str,
    *,
    out: Path | None,
    form: bool,
    add: Path | None,
    crate: bool = False,
    signed: bool = False,
) -> None:
    """Write the report of a run, a record or a recipe's committed records, and print its path.

    Args:
        form: write the file with which a record is sent in instead.
        add: a record that was sent in, to be added to the recipe's results before.
        crate: write the RO-Crate of a run, or of a single record, instead.
        signed: refuse what no known signer has signed; the record of `add` alone where one is added.

    Raises:
        InputError: options exclude each other, or there is no such record or recipe.
    """
    path, project = Path(what), Project(root, signed=is_demanded(root, asked=signed))
    of_one = path.suffix == ".json" or (path / "record.json").is_file()
    demand_without("--crate", given=crate, form=form, add=add)
    demand_without("--form", given=form, add=add)
    if crate and not of_one:
        raise InputError("a crate is of one run", place="--crate", found=what, allowed="a run or a record")
    if add and of_one:
        raise InputError("a record is added to a recipe", place="--add", found=what, allowed="recipes/RECIPE")
    if crate or form or of_one:
        _report_run(project, path, out=out, form=form, crate=crate)
        return
    if add:
        added, record = add_submission(add, what, project)
        say(f"added: {added}")
        say(f"{headline(record)} As sent in, {record.signature}: who ran it, and on what, nobody here saw.")
        project = Project(root)
    say(_recipe_report(project, what, out))


def why(root: Path, what: str, claim: str, *, signed: bool) -> None:
    """Print the conditions of a verdict; raises InputError for a claim that the record has none of."""
    record = read_record(Path(what), Project(root, signed=is_demanded(root, asked=signed)))
    verdicts = {one.claim: one for one in record.verdicts}
    if claim not in verdicts:
        raise InputError(
            "no such claim", place="--why", found=claim, allowed=list(verdicts), hint=closest(claim, verdicts)
        )
    show(condition_table(verdicts[claim]))
    say(f"{outcome(verdicts[claim])}: {verdicts[claim].why}")
    say(f"the record is {record.signature}", file=sys.stderr)


def _report_run(project: Project, path: Path, *, out: Path | None, form: bool, crate: bool) -> None:
    """Write what is asked for of one run: its page, its submission or its crate."""
    run = read_run(path, project)
    if crate:
        say(write_crate(out or run.folder / "crate", run))
    elif form:
        say(send(run, out or (path if path.is_dir() else Path()) / FILE))
    else:
        beside = run.folder.with_name(f"{run.folder.name}.html")
        usual = beside if run.is_committed else run.folder / "report.html"
        say(write_report(out or usual, run))
        say(f"the record is {run.record.signature}", file=sys.stderr)


def _recipe_report(project: Project, name: str, out: Path | None) -> Path:
    loaded = project.recipe(name)
    files = project.results(loaded)
    if not files:
        raise InputError(
            "no records to report",
            place=f"{loaded.folder}/results",
            hint="copy a record.json there, or name a run folder",
        )
    records = [read_record(file, project) for file in files]
    return write_recipe_report(
        out or project.root / "runs" / loaded.recipe.name / "report.html",
        records=records,
        recipe=loaded,
        project=project,
        between=judge_between(selected(records), project),
    )


def hardware_report(root: Path, model: str, *, out: Path | None, price: str) -> None:
    """Write which hardware to choose for a model, or for `all`, and print the path of the page."""
    project = Project(root)
    prices = prices_of(price, project.gpus)
    only = None if model == "all" else model
    if only:
        member(model, place="invoke report --hardware")
    page = out or root / "runs" / "hardware.html"
    write_hardware_page(page, choices(project, committed_records(project), only=only), prices)
    say(page)


def committed_records(project: Project) -> list[Record]:
    """Return the records of all recipes."""
    loaded = (project.recipe(name) for name in project.recipe_names)
    return [read_record(file, project) for one in loaded for file in project.results(one)]
