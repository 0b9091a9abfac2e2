"""`invoke report`: the page, crate, form or submission of records, and which hardware to choose."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from twinrun.cli.console import demand_without
from twinrun.export.ro_crate import write_crate
from twinrun.export.tracked_run import tracked_run
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.terminal import say
from twinrun.machine.doctor import diagnose
from twinrun.planning.project import Project
from twinrun.protocol.models import member
from twinrun.report.form import form as submission_form
from twinrun.report.hardware import choices
from twinrun.report.hardware_page import prices_of, write_hardware_page
from twinrun.report.page import write_recipe_report, write_report
from twinrun.report.summary import selected
from twinrun.report.words import headline
from twinrun.results.between import judge_between
from twinrun.results.reading import read_record
from twinrun.results.record import Record
from twinrun.results.submission import FILE, add_submission, write_submission


def report(
    root: Path, what: str, *, out: Path | None, form: bool, add: Path | None, crate: bool = False
) -> None:
    """Write the report of a run, a record or a recipe's committed records, and print its path.

    Args:
        form: write the file with which a record is sent in instead.
        add: a record that was sent in, to be added to the recipe's results before.
        crate: write the RO-Crate of a run, or of a single record, instead.
    """
    path, project = Path(what), Project(root)
    of_one = path.suffix == ".json" or (path / "record.json").is_file()
    if crate:
        demand_without("--crate", given=True, form=form, add=add)
        if not of_one:
            raise InputError(
                "a crate is of one run", place="--crate", found=what, allowed="a run or a record"
            )
        say(_crate(project, path, out=out))
        return
    if form and add:
        raise InputError("one of both", place="--form, --add", hint="--form is of a run, --add of a recipe")
    if form:
        say(send(project, path, out=out))
        return
    if add and of_one:
        raise InputError("a record is added to a recipe", place="--add", found=what, allowed="recipes/RECIPE")
    if add:
        say("\n".join(add_to_results(project, what, add)))
    if of_one:
        record = read_record(path, project)
        say(write_run_report(project, record, out or _page_of(project, path, record)))
        say(f"the record is {record.signature}", file=sys.stderr)
    else:
        say(_recipe_report(project, what, out))


def _crate(project: Project, path: Path, *, out: Path | None) -> Path:
    """Write the crate of a run to its folder, of a single record among the runs; return its metadata."""
    record, folder = read_record(path, project), path if path.is_dir() else path.parent
    whole = (folder / "record.json").is_file()
    usual = folder if whole else project.root / "runs" / record.plan.recipe / path.stem
    # Of a committed record there is nothing beside it that belongs to it.
    run = tracked_run(record, folder if whole else usual, project.metrics)
    return write_crate(
        out or usual / "crate",
        record=record,
        recipe=project.recipe(record.plan.recipe),
        root=project.root,
        run=run,
        source=path / "record.json" if path.is_dir() else path,
    )


def hardware_report(root: Path, model: str, *, out: Path | None, price: str) -> None:
    """Write which hardware to choose for a model, or for `all`, and print the path of the page."""
    project = Project(root)
    prices = prices_of(price, project.gpus)
    only = None if model == "all" else model
    if only:
        member(model, place="invoke report --hardware")
    page = out or root / "runs" / "hardware.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_hardware_page(page, choices(project, committed_records(project), only=only), prices)
    say(page)


def committed_records(project: Project) -> list[Record]:
    """Return the records of all recipes."""
    loaded = (project.recipe(name) for name in project.recipe_names)
    return [read_record(file, project) for one in loaded for file in project.results(one)]


def _page_of(project: Project, path: Path, record: Record) -> Path:
    """Return the page of a run, in its folder; of a single record, among the runs."""
    folder = path if path.is_dir() else path.parent
    if (folder / "record.json").is_file():
        return folder / "report.html"
    page = project.root / "runs" / record.plan.recipe / f"{path.stem}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    return page


def _recipe_report(project: Project, name: str, out: Path | None) -> Path:
    loaded = project.recipe(name)
    files = project.results(loaded)
    if not files:
        raise InputError(
            "no records to report",
            place=f"{loaded.folder}/results",
            hint="copy a record.json there, or name a run folder",
        )

    page = out or project.root / "runs" / loaded.recipe.name / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    records = [read_record(file, project) for file in files]
    write_recipe_report(
        page,
        records=records,
        recipe=loaded,
        gpus=project.gpus,
        metrics=project.metrics,
        between=judge_between(selected(records), project),
    )
    return page


def write_run_report(project: Project, record: Record, page: Path) -> Path:
    """Write the report of a run to `page` and return that path."""
    write_report(
        page,
        record=record,
        recipe=project.recipe(record.plan.recipe),
        gpus=project.gpus,
        metrics=project.metrics,
    )
    return page


def offer(project: Project, record: Record, folder: Path) -> str:
    """Keep a form, and the file that goes with it, for hardware that the recipe has no record of.

    Returns:
        The form, why there is none, or nothing for hardware that is known.
    """
    known = project.results(project.recipe(record.plan.recipe))
    text = submission_form(record, [read_record(file, project) for file in known])
    if text is None:
        return ""
    try:
        _write_submission(project, folder, record, folder / FILE)
    except InputError as reason:
        return f"The results have no such GPU yet, and cannot take this run: {reason.message}\n"
    write_atomically(folder / "form.md", text)
    return text


def send(project: Project, what: Path, *, out: Path | None) -> Path:
    """Write the submission of a run to its folder, of a single record to the working folder; return it."""
    record, usual = read_record(what, project), (what if what.is_dir() else Path()) / FILE
    return _write_submission(project, what, record, out or usual)


def add_to_results(project: Project, recipe: str, file: Path) -> list[str]:
    """Add a submission to the results of a recipe; return lines that say what it is."""
    path, record = add_submission(file, recipe, project)
    sent_in = f"As sent in, {record.signature}: who ran it, and on what, nobody here saw."
    return [f"added: {path}", f"{headline(record)} {sent_in}"]


def _write_submission(project: Project, source: Path, record: Record, out: Path) -> Path:

    ran_on = record.machine.host, record.machine.kernel
    here = ran_on == (platform.node(), platform.release())
    doctor = diagnose(project.root).model_dump(mode="json") if here else None
    write_submission(out, source, project, doctor=doctor)
    return out
