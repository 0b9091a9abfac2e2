"""Records read from files, the one place where a record comes in, and who signed and confirms them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import parse_json, read_regular, real, sha256_of_file
from twinrun.foundation.manifest import MAX_JSON_BYTES, Frozen, validate
from twinrun.foundation.signatures import SUFFIX, UNSIGNED, demand_signed, signature_in, signed_by, signers_of
from twinrun.foundation.text import number
from twinrun.planning.project import Project
from twinrun.results.judge import judged
from twinrun.results.judged import Judged, gpus_of
from twinrun.results.record import MAJOR, MINOR, Record, content_digest
from twinrun.results.verdicts import HOLDS, Verdict
from twinrun.workloads.curve_distance import largest_difference, values_of

SIGNED = "signed by "
HINT = "name a run folder of runs/, or a record of recipes/RECIPE/results"


def read_record(path: Path, project: Project, *, own: bool = False) -> Judged:
    """Read a record, or the record of a run folder, and judge it by the claims as they stand.

    Args:
        own: a record of this checkout beside another: no signature of it is demanded.

    Raises:
        InputError: missing, not a record, edited after it was written, or without a signature that the
            project demands.
    """
    file = path / "record.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError("no such record", place=str(file), hint=HINT)
    try:
        content = parse_json(read_regular(file, limit=MAX_JSON_BYTES, links=True))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"not a record: {error}", place=str(file), hint=HINT) from None
    record = read_content(content, place=str(file))
    _demand_files(record, file)
    signature, signer = signature_file(file), UNSIGNED
    if not own and os.path.lexists(signature):
        signer = signer_in(signature_in(signature), record, project, place=str(signature))
    if not own and project.signed:
        demand_signed(signer, place=str(file), root=project.root)
    return judged(record, project, signer)


def read_content(content: Any, *, place: str) -> Record:
    """Return what a record's file says; raises InputError at `place` where it is none, or was edited."""
    if not isinstance(content, dict) or not {"plan", "points", "sha256"} <= content.keys():
        found = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        raise InputError("not a record", place=place, found=found or "an empty table", hint=HINT)
    version = str(content.get("schema_version"))
    major, _, minor = version.partition(".")
    if major != str(MAJOR) or not minor.isdecimal() or int(minor) > MINOR:
        message, allowed = "a record of an unknown version", f"{MAJOR}.0 to {MAJOR}.{MINOR}"
        hint = "a newer twinrun reads newer records; run the recipe again for what an older one wrote"
        raise InputError(message, place=f"{place}:schema_version", found=version, allowed=allowed, hint=hint)
    # The digest is of the file's own content: keys that the schema has gained since do not count.
    if (found := content_digest(content)) != content["sha256"]:
        message, hint = "the record was changed after it was written", "a record is never edited"
        allowed = f"content {str(content['sha256'])[:12]}, as the record says of itself"
        raise InputError(message, place=place, found=f"content {found[:12]}", allowed=allowed, hint=hint)
    try:
        return validate(content, Record, place=place)
    except InputError as error:
        # A workload reads its own parts, and does not know of which file.
        if not str(error.place).startswith(place):
            error.place = f"{place}:{error.place}"
        raise


def _demand_files(record: Record, file: Path) -> None:
    """Hold the digests of the run's other files against those that lie beside a run's own record."""
    for name, digest in record.files.items() if file.name == "record.json" else ():
        path = file.parent / name
        if not os.path.lexists(path):
            continue
        try:
            found = sha256_of_file(path)
        except OSError as error:
            found = str(error.strerror)
        if found != digest:
            message = "not the file that the record is of"
            raise InputError(message, place=str(path), found=found, allowed=digest)


def signature_file(file: Path) -> Path:
    """Return where the signature of a record, or of a submission, lies."""
    return file.with_name(f"{file.name}{SUFFIX}")


def signer_in(signature: str, record: Record, project: Project, *, place: str) -> str:
    """Return who signed a record, with a key that was valid when the record was made."""
    made = datetime.fromisoformat(record.created)
    return signed_by(record.sha256, signature, place=place, signers=signers_of(project.root), when=made)


def read_records(paths: Sequence[Path], project: Project) -> list[Judged]:
    """Read the records that `paths` name: files, run folders, or folders of either.

    Raises:
        InputError: no record, one that does not hold, or records of several recipes or without such claims.
    """
    named: list[Path] = []
    for path in paths:
        folder = path.is_dir() and not (path / "record.json").is_file()
        inside = sorted([*path.glob("*.json"), *path.glob("*/record.json")]) if folder else []
        named += inside or [path]
    records = [read_record(file, project) for file in dict.fromkeys(map(real, named))]
    recipes = sorted({one.plan.recipe for one in records})
    if len(recipes) > 1:
        raise InputError("the records are of different recipes", found=recipes, allowed="one recipe")
    if not records[0].recipe.published.between_records:
        place = f"recipes/{recipes[0]}/published.toml:between_records"
        hint = "leave --claims out: `invoke report` judges the other claims"
        raise InputError("the recipe has no claim between records", place=place, hint=hint)
    return records


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A judged record, and where what is written of it goes."""

    record: Judged
    folder: Path
    """Run folder; of a committed record, the folder of `runs/` for all that is written of it."""
    file: Path
    """File of the record."""


def read_run(path: Path, project: Project) -> FinishedRun:
    """Read a record file, or the record of a run folder, and judge it; raises InputError as `read_record`."""
    record = read_record(path, project)
    file = path / "record.json" if path.is_dir() else path
    own = (file.parent / "record.json").is_file()
    folder = file.parent if own else project.root / "runs" / record.plan.recipe / file.stem
    return FinishedRun(record=record, folder=folder, file=file)


class Confirmation(Frozen):
    """What a second record says of one verdict."""

    claim: str
    confirmed: bool
    why: str


def confirmations(a: Judged, b: Judged) -> tuple[Confirmation, ...]:
    """Return for each verdict of A that holds whether B confirms it, and why or why not."""
    apart, agrees = _apart(a, b), f"{b.run}, {b.signer}, agrees within both spreads"
    lack = {one.claim: apart or _lacking(a, b, one) for one in a.verdicts if one.final in HOLDS}
    return tuple(Confirmation(claim=name, confirmed=not why, why=why or agrees) for name, why in lack.items())


def confirmed_by(found: Judged) -> dict[str, str]:
    """Return the claims that a committed record of the same recipe confirms, each with its signer."""
    files = found.project.results(found.recipe) if found.signer.startswith(SIGNED) else ()
    confirmed: dict[str, str] = {}
    for other in (read_record(file, found.project) for file in files):
        signer = other.signer.removeprefix(SIGNED)
        confirmed |= {one.claim: signer for one in confirmations(found, other) if one.confirmed}
    return confirmed


def _apart(a: Judged, b: Judged) -> str:
    """Return why no verdict of A can be confirmed by B, empty where one can."""
    for side in (a, b):
        if not side.signer.startswith(SIGNED):
            return f"{side.run} is {side.signer}, and both must be signed by somebody who is known"
    if a.signer == b.signer:
        return f"both are {a.signer}: a second signer confirms"
    for mine, theirs in ((a.plan.recipe, b.plan.recipe), (gpus_of(a), gpus_of(b))):
        if mine != theirs:
            return f"they are of {mine} and {theirs}"
    same = a.run == b.run or [one.result for one in a.points] == [one.result for one in b.points]
    return "both are of one run" if same else ""


def _lacking(a: Judged, b: Judged, verdict: Verdict) -> str:
    """Return what keeps a verdict from being confirmed: another outcome, other points, other numbers."""
    other = next((one for one in b.verdicts if one.claim == verdict.claim), None)
    if other is None or other.final not in HOLDS:
        return f"there it is {other.final if other else 'not asked'}"
    said, tolerance = verdict.here or verdict, a.recipe.published.restated[verdict.claim].tolerance
    metrics = {verdict.metric, said.metric}
    curved = {name for name in metrics if a.project.metrics[name].series}
    for name in said.points:
        mine, theirs = a.point(name), b.point(name)
        if theirs is None or mine is None:
            return f"it has no point {name}"
        for one in (one for one in mine.measurements if one.metric in metrics - curved):
            beside = theirs.measurement(one.id)
            if beside is None or not one.overlaps(beside):
                ends = f"{number(beside.low)} to {number(beside.high)}" if beside else "nothing"
                return f"{one.id} at {name} is {number(one.low)} to {number(one.high)} and there {ends}"
        for metric in curved:
            curves = [values_of(point, metric) for point in (mine, theirs)]
            far, step = largest_difference(curves)
            if not far <= tolerance:
                return f"the {metric} at {name} is {far:.2g} apart at step {step}, allowed {tolerance:g}"
    return ""
