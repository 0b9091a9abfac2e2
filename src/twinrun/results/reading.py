"""Records read from files; digests, derived numbers and verdicts are computed again and must agree."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import (
    canonical_json,
    parse_json,
    read_regular,
    real,
    sha256_of_bytes,
    sha256_of_file,
)
from twinrun.foundation.manifest import MAX_JSON_BYTES, validate
from twinrun.foundation.signatures import SUFFIX, demand_signed, signed_by, signers_of
from twinrun.manifests.metrics import Metric
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.planning.configuration import differences_of_plan
from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement, Series
from twinrun.results.content import check_content, check_extent, check_times_and_names
from twinrun.results.judge import RULES, claims_digest, judge
from twinrun.results.record import Record, content_digest
from twinrun.results.verdicts import Verdict
from twinrun.workloads.workload import Point, PointRecord

# The one form that is read.
VERSION = 2
HINT = "name a run folder of runs/, or a record of recipes/RECIPE/results"
# Figures are computed from the same numbers in the same order; another libm may round the last digit.
CLOSE = 1e-9
ROUNDED = 1e-12


def read_record(path: Path, project: Project, *, own: bool = False) -> Record:
    """Read a record, or the record of a run folder, judged by the claims as they stand.

    Args:
        own: a record of this checkout beside another: no signature of it is demanded.

    Raises:
        InputError: missing, not a record, its parts contradict each other, or it lacks a signature that the
            project demands.
    """
    file = path / "record.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError("no such record", place=str(file), hint=HINT)
    try:
        content = parse_json(read_regular(file, limit=MAX_JSON_BYTES, links=True))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"not a record: {error}", place=str(file), hint=HINT) from None
    record = read_content(content, project, place=str(file))
    _check_files(record, file.parent)
    return record if own else with_signature(record, file, project)


def signature_file(file: Path) -> Path:
    """Return where the signature of a record, or of a submission, lies."""
    return file.with_name(f"{file.name}{SUFFIX}")


def with_signature(record: Record, file: Path, project: Project) -> Record:
    """Return the record and its signer; raises InputError where a signature is wrong, or demanded."""
    signature = signature_file(file)
    if os.path.lexists(signature):
        record = record.signed(signed_by(record.sha256, signature, signers=signers_of(project.root)))
    if project.signed:
        demand_signed(record.signature, place=str(file), root=project.root)
    return record


def read_records(paths: Sequence[Path], project: Project) -> list[Record]:
    """Read the records that `paths` name: files, run folders, or folders of either.

    Raises:
        InputError: no record, one that does not hold, or records of several recipes or without such claims.
    """
    files = dict.fromkeys(real(file) for path in paths for file in _record_files(path))
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


def _record_files(path: Path) -> list[Path]:
    if not path.is_dir() or (path / "record.json").is_file():
        return [path]
    found = sorted([*path.glob("*.json"), *path.glob("*/record.json")])
    return found or [path]


def read_content(content: Any, project: Project, *, place: str) -> Record:
    """Read what a record's file says; raises as `read_record` does, at `place`."""
    _check_schema(content, place)
    check_content(content, place)
    _check_digest(content, place)
    demand_same("the plan's hash", plan_hash(content), content.get("plan_sha256"), place)
    record = validate(content, Record, place=place)
    check_times_and_names(record, place)
    loaded = project.recipe(record.plan.recipe)
    demand_same("the workload of its recipe", loaded.workload, record.plan.workload, place)
    published = loaded.published
    check_machine(record, project, place)
    check_points(record, project.metrics, place)
    digest = claims_digest(published)
    known = record.claims_sha256 == digest and record.rules == RULES
    record = with_fingerprint(record, loaded, place, known=known)
    _check_derived(record, place)
    verdicts = judge(record, published, project)
    if record.claims_sha256 == digest:
        return _same_verdicts(record, verdicts, place, known=known)
    return record.judged_anew(verdicts, f"{digest[:8]}: {_changed(record.verdicts, verdicts)}")


def _check_schema(content: Any, place: str) -> None:
    if not isinstance(content, dict) or not {"plan", "points", "sha256"} <= content.keys():
        found = ", ".join(list(content)[:3]) if isinstance(content, dict) else type(content).__name__
        raise InputError("not a record", place=place, found=found or "an empty table", hint=HINT)
    if content.get("schema_version") != VERSION:
        raise InputError(
            "a record of an unknown version",
            place=f"{place}:schema_version",
            found=repr(content.get("schema_version")),
            allowed=[VERSION],
            hint="a newer twinrun reads newer records",
        )


def _check_digest(content: dict[str, Any], place: str) -> None:
    # The digest is of the file's own content: fields that the model has gained since do not count.
    found = content_digest(content)
    if found != content["sha256"]:
        raise InputError(
            "the record was changed after it was written",
            place=place,
            found=f"content {found[:12]}",
            allowed=f"content {str(content['sha256'])[:12]}, as the record says of itself",
            hint="compare the untouched file; a record is never edited",
        )


def plan_hash(content: dict[str, Any]) -> str:
    """Return the hash of the plan as the file has it: fields that plans have gained since do not count."""
    plan = content["plan"]
    if isinstance(plan, dict) and isinstance(plan.get("points"), list):
        # Plan.sha256 leaves these out too: they are no part of what a run does.
        points = [
            {key: value for key, value in point.items() if key not in {"seconds", "predicted"}}
            for point in plan["points"]
            if isinstance(point, dict)
        ]
        plan = plan | {"points": points}
    return sha256_of_bytes(canonical_json(plan).encode())


def _check_files(record: Record, folder: Path) -> None:
    """Hold the digests of the run's other files against those that lie beside the record."""
    for name, digest in record.files.items():
        file = folder / name
        if (folder / "record.json").is_file() and os.path.lexists(file):
            demand_same(f"SHA-256 of {name}", _digest_of(file), digest, str(file))


def _digest_of(file: Path) -> str:
    """Return the SHA-256 of a file of a run folder; raises InputError for anything else, such as a pipe."""
    try:
        return sha256_of_file(file)
    except OSError as error:
        raise InputError("cannot be read", place=str(file), found=error.strerror, allowed="a file") from None


def _check_derived(record: Record, place: str) -> None:
    """Hold what follows from the measured numbers of a record against what it says."""
    for point in record.points:
        computed = record.workload.derived(record.plan.part, point, record.gpu)
        for one in computed:
            if recorded := point.measurement(one.id):
                slack = _rounding(one) if record.converted_from else ROUNDED
                _demand_equal(one, recorded, f"{point.id}, {one.id}", place, slack=slack)
        lacking = [one.id for one in computed if not point.measurement(one.id)]
        demand_same(f"{point.id}: derived numbers that are missing", [], lacking, place)
        _demand_known(point, {one.id for one in computed}, record, place)


def _demand_known(point: PointRecord, computed: set[str], record: Record, place: str) -> None:
    """Refuse numbers that are neither measured nor follow from what is, such as an MFU without a peak."""
    account, reported = record.workload.account, record.description.reports
    basis = [one for one in point.measurements if one.id not in computed and one.id not in reported]
    wrong = [f"{one.id} of {one.metric}" for one in basis if not account.measures(one.id, one.metric)]
    demand_same(f"{point.id}: numbers that nothing gives", [], sorted(wrong), place)


def _rounding(computed: Measurement) -> float:
    """Return how far the median of a converted record may be from the one that is computed.

    Version 1 took the median of the rates of an even number of steps, which is not the rate of the median.
    """
    return ROUNDED if computed.count % 2 else max(computed.high - computed.low, ROUNDED)


def _demand_equal(
    computed: Measurement, recorded: Measurement, what: str, place: str, *, slack: float
) -> None:
    for field, allowed in {"median": slack, "low": ROUNDED, "high": ROUNDED}.items():
        a, b = getattr(computed, field), getattr(recorded, field)
        if not math.isclose(a, b, rel_tol=CLOSE, abs_tol=allowed):
            demand_same(f"{field} of {what}", a, b, place)
    for field in ("count", "unit", "per", "formula", "metric"):
        demand_same(f"{field} of {what}", getattr(computed, field), getattr(recorded, field), place)


def _same_verdicts(record: Record, verdicts: tuple[Verdict, ...], place: str, *, known: bool) -> Record:
    """Return the record with today's verdicts, which by the same claims and rules are those recorded."""
    today = {verdict.claim: verdict for verdict in verdicts}
    for recorded in record.verdicts if known else ():
        if found := today.get(recorded.claim):
            demand_same(f"the verdict on {recorded.claim}", found.outcome, recorded.outcome, place)
            demand_same(f"the restated verdict on {recorded.claim}", found.final, recorded.final, place)
    return record.model_copy(update={"verdicts": verdicts})


def _changed(recorded: Sequence[Verdict], today: Sequence[Verdict]) -> str:
    """Say which claims have another value or verdict than when the record was written."""
    before, now = ({one.claim: one for one in verdicts} for verdicts in (recorded, today))
    parts = [f"{name} is new" for name in now if name not in before]
    for name, old in before.items():
        new = now.get(name)
        if new is None:
            parts.append(f"{name} was dropped")
        elif (old.published, old.unit) != (new.published, new.unit):
            parts.append(f"{name} was {old.published:g} {old.unit} and is {new.published:g} {new.unit}")
        elif old.final != new.final:
            parts.append(f"{name} came to {old.final} and comes to {new.final}")
    return "; ".join(parts) or "no value and no verdict changed"


def demand_same(what: str, computed: object, recorded: object, place: str) -> None:
    """Raise InputError with both sides where a record does not say what follows from its other parts."""
    if computed != recorded:
        raise InputError(
            f"the record contradicts itself: {what}",
            place=place,
            found=f"recorded {recorded}",
            allowed=f"computed {computed}",
            hint="a record is never edited; run the recipe again",
        )


def check_machine(record: Record, project: Project, place: str) -> None:
    """Hold the GPU of a record against its plan, its machine and images/gpus.toml."""
    named = record.gpu.id if record.gpu else None
    demand_same("the GPU of the plan", named, record.plan.gpu, place)
    demand_same("the vendor of the machine", record.plan.vendor, record.machine.vendor, place)
    probed = {device.gpu for device in record.machine.devices if device.gpu}
    if probed:
        demand_same("the GPU that was probed", ", ".join(sorted(probed)), named, place)
    if record.gpu is None:
        return
    row = project.gpus.get(record.gpu.id)
    if row is None:
        raise InputError("no such GPU in images/gpus.toml", place=f"{place}:gpu.id", found=record.gpu.id)
    demand_same("the vendor of the GPU", row.vendor, record.plan.vendor, place)
    for field in ("name", "arch", "devices_per_card", "memory_gb", "bandwidth_gb_s", "peak_bf16_tflops"):
        demand_same(
            f"{field} of {row.id} in images/gpus.toml", getattr(row, field), getattr(record.gpu, field), place
        )
    for device in record.machine.devices:
        if device.arch:
            demand_same(f"the architecture of device {device.index}", row.arch, device.arch, place)


def check_points(record: Record, metrics: Mapping[str, Metric], place: str) -> None:
    """Hold each point against the one that was planned, its numbers against their metrics."""
    if record.plan.scale not in SCALES:
        demand_same("its scale", " or ".join(SCALES), record.plan.scale, place)
    planned = {point.id: point for point in record.plan.points}
    for point in record.points:
        where = f"{place}:points.{point.id}"
        if point.id not in planned:
            raise InputError("the plan has no such point", place=where, found=point.id, allowed=list(planned))
        _check_planned(record, planned[point.id], point, where)
        numbers: tuple[Measurement | Series, ...] = (*point.measurements, *point.series)
        for number in numbers:
            _check_metric(number, metrics, where)


def _check_planned(record: Record, planned: Point, point: PointRecord, where: str) -> None:
    demand_same("nodes of the plan", planned.nodes, point.nodes, where)
    demand_same("devices of the plan", planned.world_size, point.devices, where)
    demand_same("what the plan says of the point", planned.part, point.part, where)
    for fact, allowed in record.description.points[point.id].expected.items():
        if point.facts.get(fact) not in allowed:
            demand_same(fact, " or ".join(map(str, allowed)), point.facts.get(fact), where)
    if record.allocation:
        strange = sorted(set(point.hosts) - set(record.allocation.nodes))
        demand_same("hosts that the allocation lacks", [], strange, where)


def _check_metric(number: Measurement | Series, metrics: Mapping[str, Metric], where: str) -> None:
    """Refuse a number in another unit, or per something else, than its metric has."""
    metric = metrics.get(number.metric)
    if metric is None:
        raise InputError(
            "no such metric", place=f"{where}.{number.id}", found=number.metric, allowed=list(metrics)
        )
    check_extent(number, metric, where)
    # Bytes and operations are counted alike: a unit of the same size is as good as the canonical one.
    same_size = [metric.unit, *(unit for unit, factor in metric.units.items() if factor == 1)]
    if number.unit not in same_size:
        demand_same(f"unit of {number.id}", " or ".join(same_size), number.unit, where)
    if number.per not in metric.per:
        demand_same(f"what {number.id} is counted per", " or ".join(metric.per), number.per, where)


def with_fingerprint(record: Record, recipe: LoadedRecipe, place: str, *, known: bool) -> Record:
    """Return the record with the fingerprint of its plan, held against the publication as it stands.

    Args:
        known: the publication and the rules are those that the record was judged by.
    """
    plan = record.plan
    found = record.description.marks(recipe.published.fingerprint)
    for field, value in plan.fingerprint.items():
        if field in found:
            demand_same(f"{field} of the fingerprint", found[field], value, place)
    apart = differences_of_plan(recipe, plan.part, plan.points)
    if known:
        recorded = {one.field: one.found for one in plan.differences}
        demand_same(
            "where the run is not as published", {one.field: one.found for one in apart}, recorded, place
        )
    changed = plan.model_copy(update={"fingerprint": found, "differences": apart})
    return record.model_copy(update={"plan": changed})
