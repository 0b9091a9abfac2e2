"""`twinrun report`, `compare`, `checkpoint`, `sign`: what runs leave, held together, verified and signed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rich.console import Group

from twinrun import api
from twinrun.cli.console import Shown, tell, written
from twinrun.cli.predict import committed
from twinrun.cli.program import Out, Scale, Share, demand_one, demand_with
from twinrun.foundation.cache import project_root, runs_folder
from twinrun.foundation.errors import InputError, RunError, require_known
from twinrun.foundation.signatures import is_demanded
from twinrun.foundation.text import number
from twinrun.planning.project import Project
from twinrun.protocol.scores import compare_scores, paired, read_samples
from twinrun.report import comparison, tables, words
from twinrun.results import judge, submission
from twinrun.results.compare import compare as compare_records
from twinrun.results.judged import Judged
from twinrun.results.reading import confirmations, confirmed_by, read_record, read_records, read_run
from twinrun.results.scores import claim_called, demand_recorded, judge_scores
from twinrun.results.verdicts import FAILURES

Action = Literal["verify", "list", "convert"]
Place = Path | None


def compare(
    a: Path,
    b: Path,
    /,
    *,
    claims: bool = False,
    confirm: bool = False,
    scores: bool = False,
    margin: Share = None,
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
    demand_with("--rerun", rerun, metric=metric, point=point, **typed)
    demand_with("--scores", scores, margin=margin, claim=claim)
    demand_one(scores=scores, claims=claims, confirm=confirm, rerun=rerun)
    demand_one(claim=claim, margin=margin)
    demand_one(rerun=rerun, require_signature=require_signature)
    if rerun:
        # What it imports takes seconds.
        from twinrun.cli.curves import rerun_sides

        return rerun_sides(str(a), str(b), metric=metric, point=point, **typed)
    project = Project(project_root(), signed=is_demanded(project_root(), asked=require_signature))
    if scores:
        return _scores(project, [a, b], margin, claim)
    if claims:
        records = read_records([a, b], project)
        verdicts = judge.judge_between(records)
        said = words.headline_of_all(records, verdicts)
        data = {"headline": said, "verdicts": [one.shown() for one in verdicts]}
        failed = any(verdict.final in FAILURES for verdict in verdicts)
        return Shown(Group(said, tables.verdict_table(verdicts)), data, int(failed))
    first, second = (read_record(one, project) for one in (a, b))
    if confirm:
        said_of = confirmations(first, second)
        lines = [f"{one.claim}: {'' if one.confirmed else 'not '}confirmed, {one.why}" for one in said_of]
        code = int(not any(one.confirmed for one in said_of))
        return Shown("\n".join(lines) or "no verdict of the first record holds", said_of, code)
    found = compare_records(first, second)
    return Shown(comparison.comparison_view(found), found)


def _scores(project: Project, places: list[Path], margin: float | None, claim: str | None) -> Shown:
    """Say whether two models score the same, document by document; 1 when they do not or nothing tells."""
    stated = claim_called(claim, project) if claim else None
    asked = stated.margin if stated else margin
    if asked is None:
        hint = "--margin 0.02 counts a difference of up to two points of a hundred as none"
        raise InputError("equivalence is asked inside a margin of scores", place="--margin", hint=hint)
    files = [read_samples(place) for place in places]
    for place, samples in zip(places, files, strict=True):
        # What a run folder holds is held against its record.
        if place.is_dir():
            demand_recorded(samples, read_record(place, project))
    found, rules = compare_scores(paired(*files), margin=asked), files[0].rules
    data = {"outcome": found.outcome, **dict(found), "samples": {one.place: one.sha256 for one in files}}
    if not stated:
        return Shown(comparison.scores_view(found, rules=rules), data, int(found.outcome != "equivalent"))
    verdict = judge_scores(stated, found, rules=rules)
    view = Group(comparison.scores_view(found, rules=rules), tables.verdict_table([verdict]))
    return Shown(view, data | {"verdict": verdict.shown()}, int(verdict.final != "holds-here"))


def report(
    what: str,
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
        what: folder of a recipe or of a run, or a record; with --hardware a model, or all
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
    project = Project(project_root(), signed=is_demanded(project_root(), asked=require_signature))
    if hardware:
        from twinrun.report.hardware import choices, prices_of, write_hardware_page

        prices, page = prices_of(price, project.gpus), out or runs_folder(project.root) / "hardware.html"
        found = choices(project, committed(project), only=None if what == "all" else what)
        write_hardware_page(page, found, prices)
        return written(page)
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
        file = out or (path if path.is_dir() else Path()) / submission.FILE
        submission.write_submission(file, run.record, run.file)
        return written(file)
    from twinrun.report.page import write_report

    tell(f"the record is {run.record.signer}")
    own = run.folder / "report.html" if run.file.parent == run.folder else Path(f"{run.folder}.html")
    return written(write_report(out or own, run))


def _recipe_report(project: Project, name: str, add: Path | None, out: Path | None) -> Path:
    """Write the page of a recipe's committed records, to which one that was sent in may be added before."""
    if add:
        added, record = submission.add_submission(add, name, project)
        sent = f"As sent in, {record.signer}: who ran it, and on what, nobody here saw."
        tell(f"added: {added}\n{words.headline(record)} {sent}")
        project = Project(project.root)
    from twinrun.report.page import write_recipe_report

    loaded, records = project.recipe(name), committed(project, name)
    if not records:
        hint = "copy a record.json there, or name a run folder"
        raise InputError("no records to report", place=f"{loaded.folder}/results", hint=hint)
    page = out or runs_folder(project.root) / loaded.recipe.name / "report.html"
    known: dict[str, Any] = {"recipe": loaded, "project": project, "records": records}
    return write_recipe_report(page, between=judge.judge_between(words.selected(records)), **known)


def _why(record: Judged, claim: str) -> Shown:
    """Return the conditions of a verdict; raises InputError for a claim that the record has none of."""
    verdicts = {one.claim: one for one in record.verdicts}
    require_known(claim, verdicts, "no such claim", place="--why")
    found, who = verdicts[claim], confirmed_by(record).get(claim, "nobody here")
    said = f"{words.outcome(found)}: {found.why}\nthe record is {record.signer}, confirmed by {who}"
    return Shown(Group(tables.condition_table(found), said), found.shown())


def checkpoint(
    action: Action, place: Path, /, *, step: int | None = None, out: Place = None, tokenizer: Place = None
) -> Shown:
    """Verify, list or convert the checkpoints of a run; 4 where one is damaged.

    Args:
        action: verify (every byte against its digest), list, or convert (to or from Hugging Face format)
        place: folder with the checkpoints of a run, or a folder of transformers
        step: one checkpoint; all when left out, and the newest to convert
        out: folder that a conversion writes
        tokenizer: tokenizer.json that the model was trained with, to write beside its weights
    """
    demand_with("convert", action == "convert", out=out, tokenizer=tokenizer)
    if action == "convert":
        if out is None:
            raise InputError("a conversion needs a place to write", place="--out", hint="--out FOLDER")
        return written(api.convert(place, out, step=step, tokenizer=tokenizer))
    rows = api.checkpoints(place, step=step, verify=action == "verify", root=project_root())
    damaged = any(row["damage"] for row in rows)
    return Shown("\n".join(map(_line, rows)), rows, RunError.exit_code if damaged else 0)


def _line(row: dict[str, Any]) -> str:
    if row["damage"]:
        return f"{'' if isinstance(row['step'], str) else 'step '}{row['step']}: damaged\n{row['damage']}"
    state = "good: every byte is as written" if row["verified"] else "there, not verified"
    size = f"{row['tensors']} tensors, {number(row['bytes'] / 1e6)} MB"
    return "; ".join([f"step {row['step']}: {state}", size, *([row["signature"]] if row["verified"] else [])])


def sign(what: Path, /, *, key: Path) -> Shown:
    """Sign a record or a checkpoint with an SSH key; the signature is kept beside it.

    Args:
        what: record, run folder, submission.json, or place with checkpoints, whose newest is signed
        key: private key of SSH, for example ~/.ssh/id_ed25519
    """
    signature = api.sign(what, key=key.expanduser(), root=project_root())
    return Shown(str(signature), {"signature": signature})
