"""`twinrun compare`: two records, their claims or their scores held against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Group

from twinrun.cli.console import Shown, demand_with, demand_without
from twinrun.foundation.cache import project_root
from twinrun.foundation.errors import InputError
from twinrun.foundation.signatures import is_demanded
from twinrun.planning.project import Project
from twinrun.report.comparison import comparison_view, scores_view
from twinrun.report.tables import verdict_table
from twinrun.report.words import headline_of_all
from twinrun.results.compare import compare as compare_records
from twinrun.results.confirm import confirmations
from twinrun.results.judge import judge_between
from twinrun.results.reading import read_record, read_records
from twinrun.results.scores import (
    SampleFile,
    claim_called,
    compare_scores,
    demand_recorded,
    judge_scores,
    paired,
    read_samples,
)
from twinrun.results.verdicts import FAILURES


def compare(
    a: str,
    b: str,
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
    scale: Literal["smoke", "node", "paper"] | None = None,
    set: Annotated[tuple[str, ...], Parameter(allow_repeating=True)] = (),
    point: str | None = None,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
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
    typed: dict[str, Any] = {"recipe": recipe, "metric": metric, "scale": scale, "set": set}
    typed |= {"point": point, "out": out}
    demand_with("--rerun", rerun, **typed)
    demand_with("--scores", scores, margin=margin, claim=claim)
    demand_without("--claim", bool(claim), margin=margin)
    demand_without("--rerun", rerun, claims=claims, scores=scores, require_signature=require_signature)
    demand_without("--confirm", confirm, claims=claims, scores=scores, rerun=rerun)
    demand_without("--scores", scores, claims=claims, require_signature=require_signature)
    if rerun:
        if not recipe:
            hint = "add --recipe recipes/NAME"
            raise InputError("which recipe runs is not said", place="--rerun", hint=hint)
        # What it imports takes seconds.
        from twinrun.cli.history import SearchRequest, rerun_sides

        return rerun_sides(SearchRequest(good=a, bad=b, **typed))
    project = Project(project_root(), signed=is_demanded(project_root(), asked=require_signature))
    if scores:
        return _scores(project, Path(a), Path(b), margin, claim)
    if confirm:
        confirmed = confirmations(*(read_record(Path(one), project) for one in (a, b)))
        lines = [f"{one.claim}: {'' if one.confirmed else 'not '}confirmed, {one.why}" for one in confirmed]
        return Shown(
            view=lambda: "\n".join(lines) or "no verdict of the first record holds",
            data=lambda: [one.model_dump() for one in confirmed],
            code=int(not any(one.confirmed for one in confirmed)),
        )
    if claims:
        records = read_records([Path(a), Path(b)], project)
        verdicts = judge_between(records)
        said = headline_of_all(records, verdicts)
        shown = [one.model_dump(mode="json") | {"final": one.final, "why": one.why} for one in verdicts]
        return Shown(
            view=lambda: Group(said, verdict_table(verdicts)),
            data=lambda: {"headline": said, "verdicts": shown},
            code=int(any(verdict.final in FAILURES for verdict in verdicts)),
        )
    found = compare_records(read_record(Path(a), project), read_record(Path(b), project), project)
    return Shown(view=lambda: comparison_view(found), data=lambda: found.model_dump(mode="json"))


def _scores(project: Project, a: Path, b: Path, margin: float | None, claim: str | None) -> Shown:
    """Say whether two models score the same, document by document; 1 when they do not or nothing tells."""
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
    data = {"outcome": found.outcome, **found.model_dump(mode="json")}
    data |= {"verdict": verdict.model_dump(mode="json") | {"final": verdict.final}} if verdict else {}
    tables = [verdict_table([verdict])] if verdict else []
    return Shown(
        view=lambda: Group(scores_view(found, rules=rules), *tables),
        data=lambda: data | {"samples": {one.place: one.sha256 for one in files}},
        code=int(verdict.final != "holds-here" if verdict else found.outcome != "equivalent"),
    )


def _samples_of(project: Project, place: Path) -> SampleFile:
    """Return the samples of a file, or of a run folder, which are held against its record."""
    found = read_samples(place)
    if place.is_dir():
        demand_recorded(found, read_record(place, project))
    return found
