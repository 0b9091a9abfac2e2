"""What the tasks call: each command from its arguments to its output and exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinrun.errors import InputError
from twinrun.selection import Request, Selection, select

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twinrun.locking.check import Finding
    from twinrun.record import BenchRecord, Record

__all__ = ["Request", "build", "compare", "data", "doctor", "lock", "report", "run", "schemas"]


def run(root: Path, request: Request, *, out: Path | None, resume: bool, as_json: bool) -> int:
    """Run a recipe and return the exit code: 1 when a claim is not reproduced."""
    selection = select(root, request)
    _tell(selection)
    if request.dry:
        _print(_dry(selection))
        return 0
    from twinrun.progress import Display
    from twinrun.run import execute

    with Display() as display:
        record, folder = execute(root=root, selection=selection, out=out, resume=resume, display=display)
    page = write_run_report(root, record, folder / "report.html")
    form = _form(root, selection, record, folder)
    if as_json:
        _print(summary(record, folder))
    else:
        _show(record, page)
        print(form, end="")
    return int(any(verdict.outcome in ("not-reproduced", "failed") for verdict in record.verdicts))


def _form(root: Path, selection: Selection, record: Record | BenchRecord, folder: Path) -> str:
    """Return the form for hardware that the recipe has no record of, and keep it beside the record."""
    from twinrun.files import write_atomically
    from twinrun.record import read_any_record
    from twinrun.report.form import form

    files = sorted((root / selection.recipe.folder / "results").glob("*.json"))
    text = form(record, [read_any_record(file) for file in files])
    if text:
        write_atomically(folder / "form.md", text)
    return text or ""


def _tell(selection: Selection) -> None:
    """Say what was chosen and where the run is not the published configuration."""
    for choice in selection.choices:
        print(f"{choice.name:9} {choice.value}  ({choice.because})", file=sys.stderr)
    for item in selection.plan.differences:
        print(f"differs   {item.field} is {item.found}, published {item.published}", file=sys.stderr)


def _dry(selection: Selection) -> dict[str, object]:
    from twinrun.rendering import rendered_commands

    plan = selection.plan
    return {
        "plan_sha256": plan.sha256(),
        "plan": plan.model_dump(mode="json"),
        "choices": [choice.model_dump() for choice in selection.choices],
        "commands": rendered_commands(plan, cores=selection.machine.cpu_count),
    }


def write_run_report(root: Path, record: Record | BenchRecord, page: Path) -> Path:
    """Write the report of a run to `page` and return that path."""
    from twinrun.hardware import load_gpus
    from twinrun.recipe import load_any_recipe
    from twinrun.report.page import write_report

    loaded = load_any_recipe(root, record.plan.recipe)
    write_report(page, record=record, recipe=loaded, gpus=load_gpus(root))
    return page


def summary(record: Record | BenchRecord, folder: Path) -> dict[str, object]:
    """Return what `--json` prints: where the record is, its points and verdicts."""
    from twinrun.record import BenchRecord

    if isinstance(record, BenchRecord):
        points: list[dict[str, object]] = [
            point.model_dump(mode="json", exclude={"settings", "devices"}) for point in record.points
        ]
    else:
        points = [
            {
                "id": point.id,
                "devices": point.devices,
                "microbatch": point.microbatch,
                "tokens_per_second": point.tokens_per_second.model_dump(),
                "model_flops": point.model_flops.model_dump(),
                "utilisation": point.utilisation.model_dump() if point.utilisation else None,
                "last_loss": point.losses[-1],
            }
            for point in record.points
        ]
    return {
        "run": record.run,
        "record": str(folder / "record.json"),
        "report": str(folder / "report.html"),
        "points": points,
        "verdicts": [verdict.model_dump() for verdict in record.verdicts],
    }


def _show(record: Record | BenchRecord, page: Path) -> None:
    from twinrun.record import BenchRecord
    from twinrun.report.tables import measurement_tables, points_table, verdict_table

    _view(measurement_tables(record) if isinstance(record, BenchRecord) else points_table(record))
    _view(verdict_table(record.verdicts))
    print(f"report: {page}")


def build(root: Path, options: Mapping[str, Any], *, dry: bool, as_json: bool) -> None:
    """Build the image of a stack and print where it is; with `dry` the plan alone."""
    from twinrun.building.command import BuildRequest, carry_out, planned
    from twinrun.building.progress import BuildDisplay
    from twinrun.building.view import layers_table, plan_lines

    request = BuildRequest(**options)
    plan = planned(root, request)
    if dry:
        _print(plan.summary())
        return
    with BuildDisplay() as display:
        for line in plan_lines(plan):
            display.say(line)
        outcome = carry_out(root, plan, request, display)
    if as_json:
        _print(outcome.model_dump(mode="json"))
    else:
        _view(layers_table(outcome))


def compare(a: Path, b: Path, *, as_json: bool) -> None:
    """Print what differs between two records and what that did."""
    from twinrun.compare import compare as compared
    from twinrun.compare_bench import compare_benches
    from twinrun.record import BenchRecord, read_any_record, read_record
    from twinrun.report.comparison import bench_comparison_view, comparison_view

    first, second = read_any_record(a), read_any_record(b)
    if isinstance(first, BenchRecord) and isinstance(second, BenchRecord):
        times = compare_benches(first, second)
        content, view = times.model_dump(mode="json"), bench_comparison_view(times)
    else:
        comparison = compared(read_record(a), read_record(b))
        content, view = comparison.model_dump(mode="json"), comparison_view(comparison)
    if as_json:
        _print(content)
    else:
        _view(view)


def report(root: Path, what: str, *, out: Path | None) -> None:
    """Write the report of a run, a record or a recipe's committed records, and print its path."""
    from twinrun.recipe import load_any_recipe
    from twinrun.record import read_any_record

    path = Path(what)
    if path.suffix == ".json" or (path / "record.json").is_file():
        folder = path if path.is_dir() else path.parent
        print(write_run_report(root, read_any_record(path), out or folder / "report.html"))
    else:
        print(_recipe_report(root, load_any_recipe(root, what).recipe.name, out))


def _recipe_report(root: Path, name: str, out: Path | None) -> Path:
    from twinrun.hardware import load_gpus
    from twinrun.recipe import load_any_recipe
    from twinrun.record import read_any_record
    from twinrun.report.page import write_recipe_report

    loaded = load_any_recipe(root, name)
    files = sorted((root / loaded.folder / "results").glob("*.json"))
    if not files:
        raise InputError(
            "no records to report",
            place=f"{loaded.folder}/results",
            hint="copy a record.json there, or name a run folder",
        )
    page = out or root / "runs" / name / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_recipe_report(
        page, records=[read_any_record(file) for file in files], recipe=loaded, gpus=load_gpus(root)
    )
    return page


def doctor(root: Path, *, as_json: bool, stack: str | None, engine: str | None) -> int:
    """Print what this machine offers; 3 when something needed is broken. With `stack`, run its checks."""
    from twinrun.doctor import examine
    from twinrun.report.doctor_table import examination_table

    if stack:
        return _check_stack(root, stack, engine=engine, as_json=as_json)
    examination = examine(root)
    if as_json:
        _print(examination.model_dump(mode="json"))
    else:
        _view(examination_table(examination))
    return examination.exit_code


def _check_stack(root: Path, stack: str, *, engine: str | None, as_json: bool) -> int:
    """Run the checks of a stack, telling each as it ends."""
    from twinrun.image_checks import run_checks

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    outcomes = run_checks(root, stack, engine=engine, say=say)
    if as_json:
        _print([outcome.model_dump() for outcome in outcomes])
    return 0


def lock(
    root: Path, stack: str, *, index: str | None, upgrade: bool, only: Sequence[str], check: bool
) -> int:
    """Refresh the locks of `stack`, or of all when empty; with `check` print what is wrong with them."""
    from twinrun.lock import lock_names, refresh
    from twinrun.locking.check import check as checked
    from twinrun.locking.check import exit_code

    findings: list[Finding] = []
    for name in lock_names(root, stack or None):
        if check:
            found = checked(root, name, index=index)
            findings += found
            lines = [str(finding) for finding in found]
        else:
            changed = refresh(root, name, index=index, upgrade=upgrade, only=only)
            lines = [f"{change.lock}: {change}" for change in changed]
        print("\n  ".join([f"{name}: {len(lines) or 'nothing'} {'to tell' if check else 'changed'}", *lines]))
    return exit_code(findings)


def data(root: Path, name: str, *, recipe: str, engine: str, files: int | None, endpoint: str | None) -> None:
    """Fetch and prepare a data set and print its folder."""
    from twinrun.acquisition import acquire
    from twinrun.progress import Display

    with Display() as display:
        folder = acquire(
            root, name, recipe=recipe, engine=engine, files=files, endpoint=endpoint, say=display.say
        )
    print(folder)


def schemas(root: Path) -> None:
    """Write the JSON Schemas of the manifests and print their paths."""
    from twinrun.schemas import write_schemas

    for path in write_schemas(root):
        print(path.relative_to(root))


def _view(content: RenderableType) -> None:
    # Imported late: planning a run shows no table, and rich costs it a tenth of a second.
    from rich.console import Console

    Console().print(content)


def _print(content: object) -> None:
    print(json.dumps(content, indent=1, ensure_ascii=False), file=sys.stdout)
