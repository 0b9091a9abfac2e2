"""Verdicts on claims between records: two GPUs, or two stacks, over the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.manifests.claims import ClaimSide, RecordClaim
from twinrun.manifests.metrics import RATIO
from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement
from twinrun.results.between_restated import restated_between
from twinrun.results.evidence import counted
from twinrun.results.reading import read_record
from twinrun.results.record import AsPublished, Record, Verdict


def read_records(paths: Sequence[Path], project: Project) -> list[Record]:
    """Read the records that `paths` name: files, run folders, or folders of either.

    Raises:
        InputError: no record, one that does not hold, or records of several recipes or without such claims.
    """
    files = dict.fromkeys(file.resolve() for path in paths for file in _files(path))
    records = [read_record(file, project) for file in files]
    recipes = sorted({record.plan.recipe for record in records})
    if len(recipes) > 1:
        raise InputError("the records are of different recipes", found=recipes, allowed="one recipe")
    if not project.recipe(recipes[0]).published.between_records:
        raise InputError(
            "the recipe has no claim between records",
            place=f"recipes/{recipes[0]}/published.toml:between_records",
            hint="leave --claims out: the record itself holds the verdicts on the other claims",
        )
    return records


def _files(path: Path) -> list[Path]:
    if not path.is_dir() or (path / "record.json").is_file():
        return [path]
    found = sorted([*path.glob("*.json"), *path.glob("*/record.json")])
    return found or [path]


def judge_between(records: Sequence[Record], project: Project) -> tuple[Verdict, ...]:
    """Judge the claims between records of the recipe that `records` are of, in the published order."""
    if not records:
        return ()
    published = project.recipe(records[0].plan.recipe).published
    return tuple(_judged(claim, records, project) for claim in published.between_records)


def _judged(claim: RecordClaim, records: Sequence[Record], project: Project) -> Verdict:
    verdict = _as_published(claim, records, project)
    if claim.here is None or verdict.outcome not in ("not-comparable", "config-mismatch"):
        return verdict
    return verdict.model_copy(update={"here": restated_between(claim, claim.here, records, project)})


def _as_published(claim: RecordClaim, records: Sequence[Record], project: Project) -> Verdict:
    over, under = (_of_side(claim, side, records) for side in (claim.over, claim.under))
    for side, found in ((claim.over, over), (claim.under, under)):
        if doubt := _doubt(claim, side, found):
            return _verdict(claim, "not-comparable", doubt)
    used = [one[0] for found in (over, under) for one in found.values()]
    if apart := sorted({_difference(record) for record in used} - {""}):
        return _verdict(claim, "config-mismatch", "; ".join(apart))
    ratios = [
        _value(claim, over[name][0], project) / _value(claim, under[name][0], project)
        for name in claim.values
    ]
    return _directed(claim, ratios)


def _of_side(claim: RecordClaim, side: ClaimSide, records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of a side by the setting that the mean is over."""
    found: dict[str, list[Record]] = {}
    for record in records:
        point = record.point(claim.point)
        if point and record.gpu and (record.gpu.id, record.plan.stack) == (side.gpu, side.stack):
            name = record.workload.settings(record.plan.part, point)[claim.setting]
            found.setdefault(name, []).append(record)
    return {name: found[name] for name in claim.values if name in found}


def _doubt(claim: RecordClaim, side: ClaimSide, found: dict[str, list[Record]]) -> str | None:
    """Return why a side gives no mean."""
    if absent := [name for name in claim.values if name not in found]:
        return f"no record at {claim.point} of {side} for {claim.setting} {', '.join(absent)}"
    if several := [name for name, records in found.items() if len(records) > 1]:
        return f"more than one record of {side} for {claim.setting} {', '.join(several)}"
    for name, (record,) in found.items():
        one = _measured(claim, record)
        if one is None or one.count < 2:
            return f"{side}: {claim.metric} of {name} is not measured over two steps or more"
        if record.environment.lock_differences:
            packages = ", ".join(sorted(record.environment.lock_differences)[:3])
            return f"{name} did not run on {side}: other versions of {packages}"
    return None


def _difference(record: Record) -> str:
    return ", ".join(
        f"{one.field} is {one.found}, published {one.published}" for one in record.plan.differences
    )


def _value(claim: RecordClaim, record: Record, project: Project) -> float:
    """Return what one record measured, per what the claim counts."""
    point, one = record.point(claim.point), _measured(claim, record)
    assert point is not None
    assert one is not None
    return counted(point, one, project.metrics[claim.metric], record.gpu, per=claim.per)


def _measured(claim: RecordClaim, record: Record) -> Measurement | None:
    point = record.point(claim.point)
    assert point is not None
    return next((one for one in point.measurements if one.metric == claim.metric), None)


def _directed(claim: RecordClaim, ratios: Sequence[float]) -> Verdict:
    mean = sum(ratios) / len(ratios)
    worse = (claim.value - mean if claim.better == "higher" else mean - claim.value) / claim.value
    each = ", ".join(f"{name} {ratio:.3f}" for name, ratio in zip(claim.values, ratios, strict=True))
    reason = f"mean of {each}; published {claim.value:g}, tolerance {claim.tolerance:.0%}"
    return _verdict(claim, "not-reproduced" if worse > claim.tolerance else "reproduced", reason, mean)


def _verdict(claim: RecordClaim, outcome: AsPublished, reason: str, measured: float | None = None) -> Verdict:
    return Verdict(
        claim=claim.id,
        statement=claim.statement,
        outcome=outcome,
        reason=reason,
        published=claim.value,
        measured=measured,
        unit=RATIO,
        per=claim.per,
    )
