"""Commands about records: compare two, hold claims, curves or scores against each other, report, send in."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from twinrun.cli.console import demand_without, print_json
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.terminal import say
from twinrun.machine.doctor import diagnose
from twinrun.planning.project import Project
from twinrun.protocol.models import member
from twinrun.report.comparison import comparison_view
from twinrun.report.crate import write_crate
from twinrun.report.form import form as submission_form
from twinrun.report.hardware import choices
from twinrun.report.hardware_page import prices_of, write_hardware_page
from twinrun.report.page import write_recipe_report, write_report
from twinrun.report.parity import parity_view, write_parity_page
from twinrun.report.scores import scores_view
from twinrun.report.selection import selected
from twinrun.report.tables import verdict_table
from twinrun.report.terminal import show
from twinrun.report.tracking import tracked_run
from twinrun.report.words import headline, headline_of_all
from twinrun.results.between import judge_between
from twinrun.results.compare import compare as compare_records
from twinrun.results.equivalence import compare_scores
from twinrun.results.parity import METRIC, held_between
from twinrun.results.reading import read_record, read_records
from twinrun.results.record import Record
from twinrun.results.samples import SampleFile, demand_recorded, paired, read_samples
from twinrun.results.score_claims import claim_called, judge_scores
from twinrun.results.submission import FILE, add_submission, write_submission
from twinrun.results.verdicts import FAILURES


def compare(root: Path, a: Path, b: Path, *, claims: bool, as_json: bool) -> int:
    """Print what differs between two records and what that did; with `claims` see `_compare_claims`."""
    if claims:
        return _compare_claims(root, a, b, as_json=as_json)
    project = Project(root)
    comparison = compare_records(read_record(a, project), read_record(b, project), project)
    if as_json:
        print_json(comparison.model_dump(mode="json"))
    else:
        show(comparison_view(comparison))
    return 0


def parity(
    root: Path,
    a: Path,
    b: Path,
    *,
    points: str,
    controls: Path | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Say whether two records have one loss curve, and draw it; 1 when they do not or nothing tells."""
    project = Project(root)
    records = [read_record(path, project) for path in (a, b)]
    further = read_record(controls, project) if controls else None
    named = [name.strip() for name in points.split(",")] if points else []
    claims = project.recipe(records[0].plan.recipe).published.claim
    metric = project.metrics[METRIC]
    found = held_between(*records, points=named, metric=metric, controls=further, claims=claims)
    marks = "-".join(record.digest()[:8] for record in records)
    page = out or root / "runs" / f"parity-{marks}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_parity_page(page, found, a=records[0], b=records[1])
    if as_json:
        print_json({"report": str(page), "parities": [one.parity.model_dump(mode="json") for one in found]})
    else:
        show(parity_view(found))
        say(f"report: {page}")
    return int(any(one.parity.outcome != "inside" for one in found))


def scores(root: Path, a: Path, b: Path, *, margin: float | None, claim: str, as_json: bool) -> int:
    """Say whether two models score the same, document by document; 1 when they do not or nothing tells.

    Args:
        claim: `RECIPE/CLAIM`, a published statement about two models that is judged with its own margin.
    """
    project = Project(root)
    stated = claim_called(claim, project) if claim else None
    allowed = stated.margin if stated else margin
    if allowed is None or not 0 < allowed < 1:
        raise InputError(
            "equivalence is asked inside a margin of scores",
            place="--margin",
            found=margin,
            allowed="more than 0, less than 1",
            hint="--margin 0.02 counts a difference of up to two points of a hundred as none",
        )
    files = [_samples_of(project, path) for path in (a, b)]
    found, rules = compare_scores(paired(*files), margin=allowed), files[0].rules
    verdict = judge_scores(stated, found, rules=rules) if stated else None
    if as_json:
        shown = {"outcome": found.outcome, **found.model_dump(mode="json")}
        judged = {"verdict": verdict.model_dump(mode="json") | {"final": verdict.final}} if verdict else {}
        print_json(shown | judged | {"samples": {one.place: one.sha256 for one in files}})
    else:
        show(scores_view(found, rules=rules))
        if verdict:
            show(verdict_table([verdict]))
    return int(verdict.final != "holds-here" if verdict else found.outcome != "equivalent")


def _samples_of(project: Project, place: Path) -> SampleFile:
    """Return the samples of a file, or of a run folder, which are held against its record."""
    found = read_samples(place)
    if place.is_dir():
        demand_recorded(found, read_record(place, project))
    return found


def _compare_claims(root: Path, a: Path, b: Path, *, as_json: bool) -> int:
    """Judge the claims between records of A and of B; 1 when one is not reproduced."""
    project = Project(root)
    records = read_records([a, b], project)
    verdicts = judge_between(records, project)
    said = headline_of_all(records, verdicts)
    if as_json:
        shown = [one.model_dump(mode="json") | {"final": one.final, "why": one.why} for one in verdicts]
        print_json({"headline": said, "verdicts": shown})
    else:
        say(said)
        show(verdict_table(verdicts))
    return int(any(verdict.final in FAILURES for verdict in verdicts))


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
