"""What the tasks call: each command from its arguments to its output and exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinrun.foundation.errors import InputError
from twinrun.planning.project import Project
from twinrun.runs.selection import Request, Selection, select

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twinrun.images.lock import Finding
    from twinrun.results.record import Record

__all__ = ["Request", "build", "compare", "data", "doctor", "lock", "parity", "report", "run", "schemas"]


def run(root: Path, request: Request, *, out: Path | None, resume: bool, as_json: bool) -> int:
    """Run a recipe and return the exit code: 1 when a claim or a check fails."""
    project = Project(root)
    selection = select(project, request)
    _print_choices(selection)
    if request.dry:
        _print(_dry(project, selection))
        return 0
    from twinrun.cli.sending import offer
    from twinrun.foundation.files import write_atomically
    from twinrun.results.record import FAILURES
    from twinrun.runs.progress import Display
    from twinrun.runs.run import execute

    with Display() as display:
        record, folder = execute(
            project=project, selection=selection, out=out, resume=resume, display=display
        )
    page = _write_run_report(project, record, folder / "report.html")
    for name, text in record.workload.files(record.shown()).items():
        write_atomically(folder / name, text)
    form = offer(project, record, folder)
    if as_json:
        _print(summary(record, folder))
    else:
        _show(record, page)
        print(form, end="")
    failed = any(check.outcome == "fail" for point in record.points for check in point.checks)
    return int(failed or any(verdict.final in FAILURES for verdict in record.verdicts))


def _print_choices(selection: Selection) -> None:
    """Say what was chosen and where the run is not the published configuration."""
    for choice in selection.choices:
        print(f"{choice.name:9} {choice.value}  ({choice.because})", file=sys.stderr)
    for item in selection.plan.differences:
        print(f"differs   {item.field} is {item.found}, published {item.published}", file=sys.stderr)


def _dry(project: Project, selection: Selection) -> dict[str, object]:
    from twinrun.runs.dry import commands_of

    plan = selection.plan
    return {
        "plan_sha256": plan.sha256(),
        "plan": plan.model_dump(mode="json"),
        "choices": [choice.model_dump() for choice in selection.choices],
        **commands_of(project, selection),
    }


def _write_run_report(project: Project, record: Record, page: Path) -> Path:
    """Write the report of a run to `page` and return that path."""
    from twinrun.report.page import write_report

    write_report(
        page,
        record=record,
        recipe=project.recipe(record.plan.recipe),
        gpus=project.gpus,
        metrics=project.metrics,
    )
    return page


def summary(record: Record, folder: Path) -> dict[str, object]:
    """Return what `--json` prints: where the record is, its points and verdicts."""
    from twinrun.report.words import headline

    numbers = {"id", "nodes", "devices", "hosts", "measurements", "checks", "facts"}
    return {
        "headline": headline(record),
        "run": record.run,
        "record": str(folder / "record.json"),
        "report": str(folder / "report.html"),
        "points": [point.model_dump(mode="json", include=numbers) for point in record.points],
        "verdicts": [one.model_dump() | {"final": one.final, "why": one.why} for one in record.verdicts],
    }


def _show(record: Record, page: Path) -> None:
    from twinrun.report.tables import record_tables, verdict_table
    from twinrun.report.words import headline

    print(headline(record))
    print()
    _view(verdict_table(record.verdicts))
    _view(record_tables(record))
    print(f"report: {page}")


def build(root: Path, options: Mapping[str, Any], *, dry: bool, as_json: bool) -> None:
    """Build the image of a stack and print its layers and ID; with `dry` the plan alone."""
    from twinrun.images.buildkit import BuildProgress
    from twinrun.images.command import BuildRequest, plan_lines, plan_request, result_table, run_build

    request = BuildRequest(**{**options, "index": options["index"] or _framework_index()})
    plan = plan_request(root, request)
    if dry:
        _print(plan.summary())
        return
    with BuildProgress() as progress:
        for line in plan_lines(plan):
            progress.say(line)
        result = run_build(root, plan, request, progress)
    if as_json:
        _print(result.model_dump(mode="json"))
    else:
        _view(result_table(result))


def compare(root: Path, a: Path, b: Path, *, claims: bool, as_json: bool) -> int:
    """Print what differs between two records and what that did; with `claims` see `_compare_claims`."""
    if claims:
        return _compare_claims(root, a, b, as_json=as_json)
    from twinrun.report.comparison import comparison_view
    from twinrun.results.compare import compare as compare_records
    from twinrun.results.reading import read_record

    project = Project(root)
    comparison = compare_records(read_record(a, project), read_record(b, project), project)
    if as_json:
        _print(comparison.model_dump(mode="json"))
    else:
        _view(comparison_view(comparison))
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
    from twinrun.report.parity import parity_view, write_parity_page
    from twinrun.results.parity_between import held_between
    from twinrun.results.reading import read_record

    project = Project(root)
    records = [read_record(path, project) for path in (a, b)]
    further = read_record(controls, project) if controls else None
    named = [name.strip() for name in points.split(",")] if points else []
    found = held_between(*records, points=named, controls=further)
    marks = "-".join(record.digest()[:8] for record in records)
    page = out or root / "runs" / f"parity-{marks}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_parity_page(page, found, a=records[0], b=records[1])
    if as_json:
        _print({"report": str(page), "parities": [one.parity.model_dump(mode="json") for one in found]})
    else:
        _view(parity_view(found))
        print(f"report: {page}")
    return int(any(one.parity.outcome != "inside" for one in found))


def _compare_claims(root: Path, a: Path, b: Path, *, as_json: bool) -> int:
    """Judge the claims between records of A and of B; 1 when one is not reproduced."""
    from twinrun.report.tables import verdict_table
    from twinrun.report.words import headline_of_all
    from twinrun.results.between import judge_between, read_records
    from twinrun.results.record import FAILURES

    project = Project(root)
    records = read_records([a, b], project)
    verdicts = judge_between(records, project)
    said = headline_of_all(records, verdicts)
    if as_json:
        shown = [one.model_dump(mode="json") | {"final": one.final, "why": one.why} for one in verdicts]
        _print({"headline": said, "verdicts": shown})
    else:
        print(said)
        _view(verdict_table(verdicts))
    return int(any(verdict.final in FAILURES for verdict in verdicts))


def report(root: Path, what: str, *, out: Path | None, form: bool, add: Path | None) -> None:
    """Write the report of a run, a record or a recipe's committed records, and print its path.

    Args:
        form: write the file with which a record is sent in instead.
        add: a record that was sent in, to be added to the recipe's results before.
    """
    from twinrun.cli import sending
    from twinrun.results.reading import read_record

    path, project = Path(what), Project(root)
    of_one = path.suffix == ".json" or (path / "record.json").is_file()
    if form and add:
        raise InputError("one of both", place="--form, --add", hint="--form is of a run, --add of a recipe")
    if form:
        print(sending.send(root, path, out=out))
        return
    if add and of_one:
        raise InputError("a record is added to a recipe", place="--add", found=what, allowed="recipes/RECIPE")
    if add:
        print("\n".join(sending.add(root, what, add)))
    if of_one:
        record = read_record(path, project)
        print(_write_run_report(project, record, out or _page_of(project, path, record)))
    else:
        print(_recipe_report(project, what, out))


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
    from twinrun.report.page import write_recipe_report
    from twinrun.results.between import judge_between
    from twinrun.results.reading import read_record

    page = out or project.root / "runs" / loaded.recipe.name / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    records = [read_record(file, project) for file in files]
    write_recipe_report(
        page,
        records=records,
        recipe=loaded,
        gpus=project.gpus,
        metrics=project.metrics,
        between=judge_between(records, project),
    )
    return page


def doctor(
    root: Path, *, as_json: bool, stack: str | None, engine: str | None, cluster: str | None = None
) -> int:
    """Print what this machine, or a site, offers; 3 when something needed is broken.

    Args:
        stack: run the checks of this stack instead.
    """
    if cluster:
        from twinrun.cli import sites

        return sites.doctor(root, cluster, as_json=as_json)
    if stack:
        return _check_stack(root, stack, engine=engine, as_json=as_json)
    if engine:
        hint = "add --stack STACK, or leave --engine out: without a stack every engine is looked for"
        raise InputError(
            "only the checks of a stack have an engine", place="--engine", found=engine, hint=hint
        )
    from rich.console import Console

    from twinrun.machine.doctor import diagnose
    from twinrun.report.doctor_table import diagnosis_lines

    diagnosis = diagnose(root)
    if as_json:
        _print(diagnosis.model_dump(mode="json"))
        return diagnosis.exit_code
    console = Console()
    for line in diagnosis_lines(diagnosis, width=console.width if console.is_terminal else None):
        console.print(line, soft_wrap=True)
    return diagnosis.exit_code


def _check_stack(root: Path, stack: str, *, engine: str | None, as_json: bool) -> int:
    """Run the checks of a stack, telling each as it ends."""
    from twinrun.images.checks import run_checks

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    outcomes = run_checks(root, stack, engine=engine, say=say)
    if as_json:
        _print([outcome.model_dump() for outcome in outcomes])
    return 0


def lock(
    root: Path, stack: str, *, index: str | None, upgrade: bool, only: Sequence[str], check: bool
) -> int:
    """Refresh the locks of `stack`, or of all when empty; with `check` print findings and write nothing."""
    from twinrun.images.lock import check as check_locks
    from twinrun.images.lock import exit_code, refresh, stack_names

    index = index or _framework_index()
    findings: list[Finding] = []
    for name in stack_names(root, stack or None):
        if check:
            found = check_locks(root, name, index=index, only=only)
            findings += found
            lines = [f"{name}: {len(found) or 'no'} findings", *map(str, found)]
        else:
            changes = refresh(root, name, index=index, upgrade=upgrade, only=only)
            changed = (f"{change.lock}: {change}" for change in changes)
            lines = [f"{name}: {len(changes) or 'nothing'} changed", *changed]
        print("\n  ".join(lines))
    return exit_code(findings)


def _framework_index() -> str | None:
    return os.environ.get("TWINRUN_INDEX") or None


def data(root: Path, name: str, *, recipe: str, engine: str, files: int | None, endpoint: str | None) -> None:
    """Fetch and prepare a data set and print its folder."""
    from twinrun.runs.data import acquire
    from twinrun.runs.progress import Display

    say = Display().say
    print(acquire(Project(root), name, recipe=recipe, engine=engine, files=files, endpoint=endpoint, say=say))


def schemas(root: Path) -> None:
    """Write the JSON Schemas of the manifests and print their paths."""
    from twinrun.cli.schemas import write_schemas

    for path in write_schemas(root):
        print(path.relative_to(root))


def _view(content: RenderableType) -> None:
    # Imported late: planning a run shows no table, and rich costs it a tenth of a second.
    from twinrun.report.terminal import show

    show(content)


def _print(content: object) -> None:
    print(json.dumps(content, indent=1))
