"""What the tasks call: each command from its arguments to its output and exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from twinrun.errors import InputError
from twinrun.progress import Display
from twinrun.record import Record
from twinrun.selection import Request, Selection, select

__all__ = ["Request", "compare", "data", "doctor", "lock", "report", "run", "schemas"]


def run(root: Path, request: Request, *, out: Path | None, resume: bool, as_json: bool) -> int:
    """Run a recipe and return the exit code: 1 when a claim is not reproduced."""
    selection = select(root, request)
    _tell(selection)
    if request.dry:
        _print(_dry(selection))
        return 0
    from twinrun.run import execute

    with Display() as display:
        record, folder = execute(root=root, selection=selection, out=out, resume=resume, display=display)
    page = write_run_report(root, record, folder / "report.html")
    if as_json:
        _print(summary(record, folder))
    else:
        _show(record, page)
    return int(any(verdict.outcome in ("not-reproduced", "failed") for verdict in record.verdicts))


def _tell(selection: Selection) -> None:
    """Say what was chosen and where the run is not the published configuration."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for choice in selection.choices:
        console.print(f"{choice.name:9} {choice.value}  ({choice.because})", markup=False)
    for item in selection.plan.differences:
        console.print(f"differs   {item.field} is {item.found}, published {item.published}", markup=False)


def _dry(selection: Selection) -> dict[str, object]:
    from twinrun.rendering import rendered_commands

    plan = selection.plan
    return {
        "plan_sha256": plan.sha256(),
        "plan": plan.model_dump(mode="json"),
        "choices": [choice.model_dump() for choice in selection.choices],
        "commands": rendered_commands(plan, cores=selection.machine.cpu_count),
    }


def write_run_report(root: Path, record: Record, page: Path) -> Path:
    """Write the report of a run to `page` and return that path."""
    from twinrun.hardware import load_gpus
    from twinrun.recipe import load_recipe
    from twinrun.report.page import write_report

    loaded = load_recipe(root, record.plan.recipe)
    write_report(page, record=record, recipe=loaded, gpus=load_gpus(root))
    return page


def summary(record: Record, folder: Path) -> dict[str, object]:
    """Return what `--json` prints: where the record is, its points and verdicts."""
    return {
        "run": record.run,
        "record": str(folder / "record.json"),
        "report": str(folder / "report.html"),
        "points": [
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
        ],
        "verdicts": [verdict.model_dump() for verdict in record.verdicts],
    }


def _show(record: Record, page: Path) -> None:
    from twinrun.report.tables import points_table, verdict_table

    console = Console()
    console.print(points_table(record))
    console.print(verdict_table(record.verdicts))
    console.print(f"report: {page}", soft_wrap=True)


def compare(a: Path, b: Path, *, as_json: bool) -> None:
    """Print what differs between two records and what that did."""
    from twinrun.compare import compare as compared
    from twinrun.record import read_record
    from twinrun.report.comparison import comparison_view

    comparison = compared(read_record(a), read_record(b))
    if as_json:
        _print(comparison.model_dump(mode="json"))
    else:
        Console().print(comparison_view(comparison))


def report(root: Path, what: str, *, out: Path | None) -> None:
    """Write the report of a run, a record or a recipe's committed records, and print its path."""
    from twinrun.recipe import load_recipe
    from twinrun.record import read_record

    path = Path(what)
    if path.suffix == ".json" or (path / "record.json").is_file():
        folder = path if path.is_dir() else path.parent
        print(write_run_report(root, read_record(path), out or folder / "report.html"))
    else:
        print(_recipe_report(root, load_recipe(root, what).recipe.name, out))


def _recipe_report(root: Path, name: str, out: Path | None) -> Path:
    from twinrun.hardware import load_gpus
    from twinrun.recipe import load_recipe
    from twinrun.record import read_record
    from twinrun.report.page import write_recipe_report

    loaded = load_recipe(root, name)
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
        page, records=[read_record(file) for file in files], recipe=loaded, gpus=load_gpus(root)
    )
    return page


def doctor(root: Path, *, as_json: bool) -> int:
    """Print what this machine offers; 3 when something needed is broken."""
    from twinrun.doctor import examine
    from twinrun.report.doctor_table import examination_table

    examination = examine(root)
    if as_json:
        _print(examination.model_dump(mode="json"))
    else:
        Console().print(examination_table(examination))
    return examination.exit_code


def lock(root: Path, stack: str | None, *, index: str | None, upgrade: bool, check: bool) -> int:
    """Refresh locks, or with `check` say what a refresh would change and return 1 if anything."""
    from twinrun.lock import lock_names, refresh

    changed = False
    for name in lock_names(root, stack):
        result = refresh(root, name, index=index, upgrade=upgrade, check=check)
        changed = changed or result.stale or bool(result.changes)
        print(f"{name}: {'stale' if result.stale else 'current'}, {len(result.changes)} package(s) change")
        for package, change in result.changes.items():
            print(f"  {package}: {change}")
    return int(check and changed)


def data(root: Path, name: str, *, recipe: str, engine: str, files: int | None, endpoint: str | None) -> None:
    """Fetch and prepare a data set and print its folder."""
    from twinrun.acquisition import acquire

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


def _print(content: object) -> None:
    print(json.dumps(content, indent=1, ensure_ascii=False), file=sys.stdout)
