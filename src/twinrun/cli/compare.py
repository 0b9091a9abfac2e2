"""`invoke compare`: two records, their claims or their scores held against each other."""

from __future__ import annotations

from pathlib import Path

from twinrun.cli.console import print_json
from twinrun.foundation.errors import InputError
from twinrun.foundation.signatures import is_demanded
from twinrun.foundation.terminal import say
from twinrun.planning.project import Project
from twinrun.report.comparison import comparison_view, scores_view
from twinrun.report.tables import verdict_table
from twinrun.report.terminal import show
from twinrun.report.words import headline_of_all
from twinrun.results.between import judge_between
from twinrun.results.compare import compare as compare_records
from twinrun.results.equivalence import compare_scores
from twinrun.results.reading import read_record, read_records
from twinrun.results.samples import SampleFile, demand_recorded, paired, read_samples
from twinrun.results.score_claims import claim_called, judge_scores
from twinrun.results.verdicts import FAILURES


def compare(root: Path, a: Path, b: Path, *, claims: bool, as_json: bool, signed: bool = False) -> int:
    """Print what differs between two records and what that did; with `claims` see `_compare_claims`.

    Args:
        signed: refuse records that no known signer has signed.
    """
    project = Project(root, signed=is_demanded(root, asked=signed))
    if claims:
        return _compare_claims(project, a, b, as_json=as_json)
    comparison = compare_records(read_record(a, project), read_record(b, project), project)
    if as_json:
        print_json(comparison.model_dump(mode="json"))
    else:
        show(comparison_view(comparison))
    return 0


def scores(root: Path, a: Path, b: Path, *, margin: float | None, claim: str, as_json: bool) -> int:
    """Say whether two models score the same, document by document; 1 when they do not or nothing tells.

    Args:
        claim: `RECIPE/CLAIM`, a published statement about two models that is judged with its own margin.

    Raises:
        InputError: there is no margin of scores, no such claim, or no such samples.
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


def _compare_claims(project: Project, a: Path, b: Path, *, as_json: bool) -> int:
    """Judge the claims between records of A and of B; 1 when one is not reproduced."""
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
