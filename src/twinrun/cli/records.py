"""`twinrun compare` and `report`: records held against each other, their pages, crates and submissions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group

from twinrun.cli.console import Out, Scale, Shown, demand_one, demand_with, tell, written
from twinrun.cli.predict import committed
from twinrun.foundation.cache import project_root, runs_folder
from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.signatures import is_demanded
from twinrun.planning.project import Project
from twinrun.protocol.models import member
from twinrun.protocol.scores import SampleFile, compare_scores, paired, read_samples
from twinrun.report.comparison import comparison_view, scores_view
from twinrun.report.hardware import choices, prices_of, write_hardware_page
from twinrun.report.page import write_recipe_report, write_report
from twinrun.report.summary import selected
from twinrun.report.tables import condition_table, verdict_table
from twinrun.report.words import headline, headline_of_all, outcome
from twinrun.results.compare import compare as compare_records
from twinrun.results.judge import judge_between
from twinrun.results.judged import Judged
from twinrun.results.reading import confirmations, confirmed_by, read_record, read_records, read_run
from twinrun.results.scores import claim_called, demand_recorded, judge_scores
from twinrun.results.submission import FILE, add_submission, write_submission
from twinrun.results.verdicts import FAILURES


def compare(
    a: Path,
    b: Path,
    /,
    *,
    claims: bool = False,
    confirm: bool = False,
    scores: bool = False,
    margin: float | None = None,
    claim: str | None = None,
    rerun: bool = False,
    recipe: str | None = None,
    metric: str | None = None,
    scale: Scale = None,
    set: tuple[str, ...] = (),
    point: str | None = None,
    out: Out = None,
    require_signature: bool = False,
) -> Shown:
    """Explain what differs between two records, or hold their claims or scores against each other.

    Args:
        a: record.json or folder; with --scores samples.jsonl or the folder of an evaluation
        b: another
        claims: judge the claims between records instead
        confirm: say instead which verdicts of the first a second signer's record confirms, and why or why not
        scores: say whether two models score the same instead, document by document
        margin: of scores, the largest difference that counts as none, for example 0.02
        claim: of scores, RECIPE/CLAIM: judge this claim about two models, by its own margin
        rerun: run both sides in turns on this machine instead, A twice; a side may be a stack or a lock
        recipe: of a rerun, the folder of the recipe
        metric: of a rerun, row of metrics.toml, or a measurement by its name
        scale: of a rerun, smoke, node or paper
        set: of a rerun, key=value as `run` takes it; may be given many times
        point: of a rerun, the one point to run; the first when left out
        out: of a rerun, the folder
        require_signature: refuse a record without a signature of a name in allowed_signers
    """
    typed: dict[str, Any] = {"recipe": recipe, "scale": scale, "set": set, "out": out}
    typed |= {"metric": metric, "point": point}
    demand_with("--rerun", rerun, **typed)
    demand_with("--scores", scores, margin=margin, claim=claim)
    demand_one(scores=scores, claims=claims, confirm=confirm, rerun=rerun)
    demand_one(rerun=rerun, require_signature=require_signature)
    demand_one(claim=claim, margin=margin)
    if rerun:
        # What it imports takes seconds.
        from twinrun.cli.curves import rerun_sides

        return rerun_sides(str(a), str(b), **typed)
    project = Project(project_root(), signed=is_demanded(project_root(), asked=require_signature))
    if scores:
        return _scores(project, [a, b], margin, claim)
    if claims:
        records = read_records([a, b], project)
        verdicts = judge_between(records)
        said = headline_of_all(records, verdicts)
        data = {"headline": said, "verdicts": [one.shown() for one in verdicts]}
        failed = any(verdict.final in FAILURES for verdict in verdicts)
        return Shown(Group(said, verdict_table(verdicts)), data, int(failed))
    first, second = (read_record(one, project) for one in (a, b))
    if confirm:
        found = confirmations(first, second)
        lines = [f"{one.claim}: {'' if one.confirmed else 'not '}confirmed, {one.why}" for one in found]
        none = not any(one.confirmed for one in found)
        return Shown("\n".join(lines) or "no verdict of the first record holds", found, int(none))
    comparison = compare_records(first, second, project)
    return Shown(comparison_view(comparison), comparison)


def _scores(project: Project, places: list[Path], margin: float | None, claim: str | None) -> Shown:
    """Say whether two models score the same, document by document; 1 when they do not or nothing tells."""
    stated = claim_called(claim, project) if claim else None
    asked = stated.margin if stated else margin
    if asked is None or not 0 < asked < 1:
        message, allowed = "equivalence is asked inside a margin of scores", "more than 0, less than 1"
        hint = "--margin 0.02 counts a difference of up to two points of a hundred as none"
        raise InputError(message, place="--margin", found=margin, allowed=allowed, hint=hint)
    files = [_samples_of(project, place) for place in places]
    found, rules = compare_scores(paired(*files), margin=asked), files[0].rules
    data = {"outcome": found.outcome, **dict(found), "samples": {one.place: one.sha256 for one in files}}
    if not stated:
        return Shown(scores_view(found, rules=rules), data, int(found.outcome != "equivalent"))
    verdict = judge_scores(stated, found, rules=rules)
    view = Group(scores_view(found, rules=rules), verdict_table([verdict]))
    return Shown(view, data | {"verdict": verdict.shown()}, int(verdict.final != "holds-here"))


def _samples_of(project: Project, place: Path) -> SampleFile:
    """Return the samples of a file, or of a run folder, which are held against its record."""
    found = read_samples(place)
    if place.is_dir():
        demand_recorded(found, read_record(place, project))
    return found


def report(
    what: str | None = None,
    /,
    *,
    out: Out = None,
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
    demand_one(form=form, add=add, crate=crate, why=why, hardware=hardware)
    demand_one(why=why, out=out)
    demand_one(hardware=hardware, require_signature=require_signature)
    project = Project(project_root(), signed=is_demanded(project_root(), asked=require_signature))
    if hardware:
        prices, page = prices_of(price, project.gpus), out or runs_folder(project.root) / "hardware.html"
        if what:
            member(what, place="twinrun report --hardware")
        write_hardware_page(page, choices(project, committed(project), only=what), prices)
        return written(page)
    if not what:
        allowed = "a recipe, a run folder or a record; with --hardware a model or nothing"
        raise InputError("WHAT is missing", place="twinrun report", allowed=allowed)
    path = Path(what)
    if why is not None:
        return _why(read_record(path, project), why)
    of_one = path.suffix == ".json" or (path / "record.json").is_file()
    if add or not (crate or form or of_one):
        return written(_recipe_report(project, what, add, out))
    run = read_run(path, project)
    if crate:
        from twinrun.export.ro_crate import write_crate

        return written(write_crate(out or run.folder / "crate", run))
    if form:
        file = out or (path if path.is_dir() else Path()) / FILE
        write_submission(file, run.record, run.file)
        return written(file)
    tell(f"the record is {run.record.signer}")
    for claim, who in confirmed_by(run.record).items():
        tell(f"{claim}: confirmed by {who}")
    beside = run.folder.with_name(f"{run.folder.name}.html")
    return written(write_report(out or (beside if run.is_committed else run.folder / "report.html"), run))


def _recipe_report(project: Project, name: str, add: Path | None, out: Path | None) -> Path:
    """Write the page of a recipe's committed records, to which one that was sent in may be added before."""
    if add:
        added, record = add_submission(add, name, project)
        sent = f"As sent in, {record.signer}: who ran it, and on what, nobody here saw."
        tell(f"added: {added}\n{headline(record)} {sent}")
        project = Project(project.root)
    loaded, records = project.recipe(name), committed(project, name)
    if not records:
        hint = "copy a record.json there, or name a run folder"
        raise InputError("no records to report", place=f"{loaded.folder}/results", hint=hint)
    page, between = runs_folder(project.root) / loaded.recipe.name, judge_between(selected(records))
    known: dict[str, Any] = {"recipe": loaded, "project": project, "between": between}
    return write_recipe_report(out or page / "report.html", records=records, **known)


def _why(record: Judged, claim: str) -> Shown:
    """Return the conditions of a verdict; raises InputError for a claim that the record has none of."""
    verdicts = {one.claim: one for one in record.verdicts}
    require_known(claim, verdicts, "no such claim", place="--why")
    found, who = verdicts[claim], confirmed_by(record).get(claim)
    said = f"{outcome(found)}: {found.why}\nthe record is {record.signer}"
    sure = f"\nconfirmed by {who}" if who else ""
    return Shown(Group(condition_table(found), said + sure), found.shown())
