"""`twinrun report`: the page, crate or submission of records, and which hardware to choose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Group

from twinrun.cli.console import Shown, demand_with, demand_without, tell
from twinrun.export.ro_crate import write_crate
from twinrun.foundation.cache import project_root, runs_folder
from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.signatures import is_demanded
from twinrun.planning.project import Project
from twinrun.protocol.models import member
from twinrun.report.form import send
from twinrun.report.hardware import choices, prices_of, write_hardware_page
from twinrun.report.page import write_recipe_report, write_report
from twinrun.report.summary import selected
from twinrun.report.tables import condition_table
from twinrun.report.words import headline, outcome
from twinrun.results.confirm import confirmed_by
from twinrun.results.finished_run import read_run
from twinrun.results.judge import judge_between
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record
from twinrun.results.submission import FILE, add_submission


def report(
    what: str | None = None,
    /,
    *,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    form: bool = False,
    add: Path | None = None,
    crate: bool = False,
    require_signature: bool = False,
    why: str | None = None,
    hardware: bool = False,
    price: str = "",
) -> Shown:
    """Write the report of a run, or of a recipe's committed records; send a record in, or take one.

    Args:
        what: folder of a recipe or of a run, or a record; with --hardware a model, all if left out
        out: file to write instead of report.html, submission.json with --form, or the folder of --crate
        form: write the file with which a run is sent in, without names of hosts and folders
        add: a file that was sent in: check it and add its record to the recipe's results
        crate: write a folder with the run as a Workflow Run RO-Crate, MLPerf's log lines included
        require_signature: refuse a record without a signature of a name in allowed_signers
        why: a claim of a record: print the conditions of its verdict, and what was seen of each
        hardware: write which hardware to choose: published, measured and predicted, by model
        price: of a device for an hour with --hardware, for example h200=3.1,mi300x=2
    """
    demand_with("--hardware", hardware, price=price)
    one: dict[str, Any] = {"form": form, "add": add, "crate": crate, "why": why}
    demand_without("--hardware", hardware, **one, require_signature=require_signature)
    demand_without("--why", why is not None, form=form, add=add, crate=crate, out=out)
    demand_without("--crate", crate, form=form, add=add)
    demand_without("--form", form, add=add)
    project = Project(project_root(), signed=is_demanded(project_root(), asked=require_signature))
    if hardware:
        page = out or runs_folder(project.root) / "hardware.html"
        return _written(_hardware(project, what or "all", page, price=price))
    if not what:
        allowed = "a recipe, a run folder or a record"
        hint = "`twinrun recipes` lists the recipes; --hardware says which hardware to choose"
        raise InputError("WHAT is missing", place="twinrun report", allowed=allowed, hint=hint)
    path = Path(what)
    if why is not None:
        return _why(read_record(path, project), why)
    of_one = path.suffix == ".json" or (path / "record.json").is_file()
    if crate and not of_one:
        raise InputError("a crate is of one run", place="--crate", found=what, allowed="a run or a record")
    if add and of_one:
        raise InputError("a record is added to a recipe", place="--add", found=what, allowed="recipes/RECIPE")
    if not (crate or form or of_one):
        return _written(_recipe_report(project, what, add, out))
    run = read_run(path, project)
    if crate:
        return _written(write_crate(out or run.folder / "crate", run))
    if form:
        return _written(send(run, out or (path if path.is_dir() else Path()) / FILE))
    tell(f"the record is {run.record.signer}")
    for claim, who in confirmed_by(run.record).items():
        tell(f"{claim}: confirmed by {who}")
    beside = run.folder.with_name(f"{run.folder.name}.html")
    return _written(write_report(out or (beside if run.is_committed else run.folder / "report.html"), run))


def _written(file: Path) -> Shown:
    return Shown(view=lambda: str(file), data=lambda: {"written": str(file)})


def _recipe_report(project: Project, name: str, add: Path | None, out: Path | None) -> Path:
    """Write the page of a recipe's committed records, to which one that was sent in may be added before."""
    if add:
        added, record = add_submission(add, name, project)
        sent = f"As sent in, {record.signer}: who ran it, and on what, nobody here saw."
        tell(f"added: {added}\n{headline(record)} {sent}")
        project = Project(project.root)
    loaded = project.recipe(name)
    records = [read_record(file, project) for file in project.results(loaded)]
    if not records:
        hint = "copy a record.json there, or name a run folder"
        raise InputError("no records to report", place=f"{loaded.folder}/results", hint=hint)
    return write_recipe_report(
        out or runs_folder(project.root) / loaded.recipe.name / "report.html",
        records=records,
        recipe=loaded,
        project=project,
        between=judge_between(selected(records)),
    )


def _why(record: Judged, claim: str) -> Shown:
    """Return the conditions of a verdict; raises InputError for a claim that the record has none of."""
    verdicts = {one.claim: one for one in record.verdicts}
    require_known(claim, verdicts, "no such claim", place="--why")
    found = verdicts[claim]
    who = confirmed_by(record).get(claim)
    sure = f"\nconfirmed by {who}" if who else ""
    said = f"{outcome(found)}: {found.why}\nthe record is {record.signer}{sure}"
    return Shown(
        view=lambda: Group(condition_table(found), said),
        data=lambda: found.model_dump(mode="json") | {"final": found.final, "why": found.why},
    )


def _hardware(project: Project, model: str, page: Path, *, price: str) -> Path:
    """Write which hardware to choose for a model, or for `all`, and return the page."""
    prices = prices_of(price, project.gpus)
    if model != "all":
        member(model, place="twinrun report --hardware")
    found = choices(project, committed_records(project), only=None if model == "all" else model)
    write_hardware_page(page, found, prices)
    return page


def committed_records(project: Project) -> list[Judged]:
    """Return the records of all recipes."""
    loaded = (project.recipe(name) for name in project.recipe_names)
    return [read_record(file, project) for one in loaded for file in project.results(one)]
