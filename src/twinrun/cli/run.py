"""`twinrun run`, `data` and `recipes`: from a request to the printed plan, or to the record."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Group, RenderableType

from twinrun.cli.console import LONG_SECONDS, Shown, agreed, tell
from twinrun.foundation.cache import project_root, runs_folder
from twinrun.foundation.errors import InputError, RunInterruptedError, TwinrunError
from twinrun.foundation.files import read_regular
from twinrun.foundation.text import duration
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.planning.project import Project
from twinrun.report.plan import choice_lines, everything, page, plain_table
from twinrun.report.words import claims_in_words
from twinrun.results.reading import FinishedRun, read_record
from twinrun.runs.data import acquire
from twinrun.runs.models import fetch_model
from twinrun.runs.prepared import prepare
from twinrun.runs.progress import Display
from twinrun.runs.selection import Request, select

# Recipes that are looked at whole when all are listed, and bytes of a recipe.toml.
_FEW, _LARGEST = 50, 1 << 20


def run(
    recipe: str,
    /,
    *,
    vendor: str | None = None,
    stack: str | None = None,
    engine: str | None = None,
    launcher: str | None = None,
    scheduler: str | None = None,
    cluster: str | None = None,
    image: str | None = None,
    scale: Literal["smoke", "node", "paper"] | None = None,
    set: Annotated[tuple[str, ...], Parameter(allow_repeating=True)] = (),
    controls: int | None = None,
    trace: bool = False,
    checkpoint: Annotated[tuple[str, ...], Parameter(allow_repeating=True)] = (),
    leg: int | None = None,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    track: str | None = None,
    resume: bool = False,
    require_signature: bool = False,
    detach: bool = False,
    dry: Annotated[bool, Parameter(alias="-n")] = False,
    yes: bool = False,
) -> Shown:
    """Run a published experiment and judge its claims.

    Args:
        recipe: folder of the recipe, for example recipes/mpt7b-scaling
        vendor: folder of images/vendors; what the machine has when left out
        stack: folder of images/stacks; the recipe's current one when left out
        engine: docker, apptainer, venv or host
        launcher: who starts the ranks: torchrun, srun or mpirun
        scheduler: who gives the machines: local, slurm, pbs or gridengine
        cluster: site of cluster.toml, where the scheduler is
        image: your own image of Docker or Podman, in place of the stack's; the record says what differs
        scale: how much of the experiment: on a processor, on this machine, as published
        set: key=value, a field of the table of the recipe's workload; may be given many times
        controls: control runs of the first point, which sum in other orders: 8 or more for a parity
        trace: write digests by step and layer, for `parity --trace`; nothing is compiled then
        checkpoint: key=value: steps=N between saves, mode=exact or bounded, place and source
        leg: the one leg to run, of a recipe whose run has several
        from_: where the leg before it has left its checkpoint: a run folder, or a folder of checkpoints
        out: folder for the run instead of runs/
        track: trackers to write the run for, separated by commas: tensorboard, mlflow, wandb
        resume: go on with the newest unfinished run of the same plan, and with the jobs that it has
        require_signature: go on only from checkpoints whose newest a name in allowed_signers has signed
        detach: submit the jobs of all points and return; the same command with --resume collects them
        dry: print the plan on a page and stop; with --json all of it
        yes: start without a question also what takes long on a processor
    """
    given = {name: value for name, value in locals().items() if name in Request.model_fields}
    more = [f"controls={controls}"] if controls is not None else []
    more += ["trace=true", "compile=false"] if trace else []
    request = Request(**given, settings=(*set, *more), source=from_, signed=require_signature)
    if track:
        # What trackers need is slow to import.
        from twinrun.export.tracked_run import tracked_run
        from twinrun.export.trackers import choose_trackers
    trackers = choose_trackers(track) if track else {}
    project, folder = Project(project_root()), (out or runs_folder(project_root())).absolute()
    selection = select(project, request)
    seconds = sum(point.seconds or 0.0 for point in selection.plan.points)
    text = f"about {duration(seconds)} on a processor"
    long = seconds > LONG_SECONDS and not (selection.plan.gpu or selection.accelerator)
    prepared = prepare(project, selection, out=folder, resume=resume, detach=detach, dry=dry)
    if dry:
        if long:
            tell(f"warning   {text}: the run starts only with --yes")
        for one in prepared.refusals:
            tell(f"warning   a run would be refused here: {str(one).removeprefix('error: ')}")
        return Shown(view=lambda: page(prepared), data=lambda: everything(prepared))
    for line in choice_lines(selection):
        tell(line)
    if long and not yes:
        agreed(
            f"{text}, estimated",
            place="twinrun run",
            allowed=f"up to {duration(LONG_SECONDS)} without a question",
            hint="--yes starts it; `--scale smoke` as the recipe has it takes about a minute",
        )
    from twinrun.runs.run import execute

    with Display() as display:
        finished = execute(prepared, display=display, detach=detach)
    if isinstance(finished, Path):
        from twinrun.cli.sites import pending

        return pending(finished)
    shown = _ended(finished)
    for name, tracker in trackers.items():
        tell(f"{name}: {tracker.write(finished.folder / 'trackers' / name, tracked_run(finished))}")
    return shown


def _ended(run: FinishedRun) -> Shown:
    """Write what a run has found, and return it; the code is 1 where a claim or a check failed."""
    from twinrun.export.check_files import write_check_files
    from twinrun.report.page import write_report
    from twinrun.report.tables import offer, run_tables, verdict_table
    from twinrun.report.terminal import RUN_COLUMNS
    from twinrun.report.words import headline
    from twinrun.results.verdicts import FAILURES

    record, report = run.record, write_report(run.folder / "report.html", run)
    write_check_files(run)
    parts: list[RenderableType] = [run_tables(run), f"{headline(record)}\n"]
    parts += [verdict_table(record.verdicts)] if record.verdicts else []
    parts += [f"report: {report}", offer(run).rstrip()]
    failed = any(check.outcome == "fail" for point in record.points for check in point.checks)
    return Shown(
        view=lambda: Group(*parts),
        data=lambda: {
            "headline": headline(record),
            "run": record.run,
            "record": str(run.file),
            "report": str(report),
            "points": [point.summary() for point in record.points],
            "verdicts": [one.shown() for one in record.verdicts],
        },
        code=int(failed or any(verdict.final in FAILURES for verdict in record.verdicts)),
        columns=RUN_COLUMNS,
    )


def data(
    name: str,
    /,
    *,
    recipe: str = "recipes/mpt7b-scaling",
    engine: str = "venv",
    sequence: int | None = None,
    files: int | None = None,
    endpoint: str | None = None,
) -> Shown:
    """Fetch, verify and tokenise a data set, or fetch a model; goes on where it was stopped.

    Args:
        name: a data set of the recipe, for example c4, or a model as OWNER/NAME@COMMIT
        recipe: folder of the recipe
        engine: where it is tokenised: venv, docker or host
        sequence: tokens of a sequence of a training; those of the published model when left out
        files: how many files of the data set to take; all when left out
        endpoint: server to fetch from instead of the public hub
    """
    for option, value in (("--files", files), ("--sequence", sequence)):
        if value == 0:
            raise InputError("expected a count", place=option, found=value, allowed="1 or more")
    say = Display().say
    try:
        if "/" in name:
            folder = fetch_model(name, endpoint=endpoint, say=say)
        else:
            folder = acquire(
                Project(project_root()),
                name,
                recipe=recipe,
                engine=engine,
                sequence=sequence,
                files=files,
                endpoint=endpoint,
                say=say,
            )
    except KeyboardInterrupt:
        raise RunInterruptedError("stopped", place=name, hint="the same command goes on from here") from None
    return Shown(view=lambda: str(folder), data=lambda: {"name": name, "folder": str(folder)})


def recipes() -> Shown:
    """List the recipes, what each asks, and what it would do on this machine; 2 where one is broken.

    Of more than 50 recipes only what each asks is listed.
    """
    project, code = Project(project_root()), 0
    rows, few = list[dict[str, object]](), len(project.recipe_names) <= _FEW
    for name in project.recipe_names:
        try:
            asked = {"recipe": f"recipes/{name}", "question": _question(project, name)}
            rows.append({**asked, **(summary(project.recipe(name)) | _here(project, name) if few else {})})
        except TwinrunError as error:
            tell(error)
            code = error.exit_code
    heads = {"recipe": "recipe", "question": "what it asks"}
    heads |= {"here": "on this machine", "verdicts": "verdicts here"} if few else {}
    cells = [[str(row[key]) for key in heads] for row in rows]
    hint = "\n`twinrun run RECIPE --dry` shows what a run would do; --json lists what each scale runs."
    return Shown(
        view=lambda: Group(plain_table([*heads.values()], cells), hint), data=lambda: rows, code=code
    )


def _question(project: Project, name: str) -> str:
    """Return what a recipe asks; no other key is looked at, unless that fails."""
    try:
        text = read_regular(project.root / "recipes" / name / "recipe.toml", limit=_LARGEST).decode()
        # What stands before the first table.
        return str(tomllib.loads(text.partition("\n[")[0])["question"])
    except (OSError, ValueError, KeyError):
        return project.recipe(name).recipe.question


def summary(loaded: LoadedRecipe) -> dict[str, object]:
    """Return what a recipe asks and offers: its folder, question, publication, and what each scale runs."""
    recipe = loaded.recipe
    return {
        "recipe": loaded.folder,
        "question": recipe.question,
        "publication": f"{recipe.publication.title}, {recipe.publication.figure}",
        "scales": {name: loaded.tables.scale(name).summary for name in SCALES},
    }


def _here(project: Project, name: str) -> dict[str, object]:
    """Return what `twinrun run` would choose on this machine or why it cannot, and the verdicts it has.

    Those are of the newest run of this machine, else of the newest committed record of its GPU.
    """
    loaded, gpu = project.recipe(name), ""
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
