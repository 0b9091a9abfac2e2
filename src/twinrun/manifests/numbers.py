"""What published numbers must have: a metric in its unit, a possible value, a source, what would fail it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.text import percent
from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.manifests.metrics import RATIO, Metric, named_by
from twinrun.manifests.published import PublishedClaims, Reference
from twinrun.manifests.restatements import ROUNDING, Restatement, near
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.measurements import Per
from twinrun.protocol.models import FORMULAS

# Published values are rates, times, shares and sizes in units that people read.
LARGEST, SMALLEST = 1e12, 1e-12
# A file of a public repository at one commit.
_PINNED = re.compile(r"github:[\w.-]+/[\w.-]+@[0-9a-f]{7,40}:\S+")


def check_sources(published: PublishedClaims, keys: Sequence[str], *, place: str) -> None:
    """Demand that every number cites a publication of the recipe or a pinned document; raises InputError.

    Args:
        keys: those of the recipe's publications.
    """
    restated = published.restated.values()
    named = [(f"claim {one.id}", one.source) for one in [*restated, *published.score_difference]]
    failing = [(one.id, one.here.fails_when) for one in restated if one.here]
    failing += [(one.id, one.fails_when) for one in published.score_difference]
    named += [(f"claim {name}, fails_when", one.source) for name, one in failing if one.source]
    named += [(f"reference {item.label}", item.source) for item in published.reference]
    message = "a source is a publication of the recipe or a pinned document"
    allowed = [*keys, "github:OWNER/REPOSITORY@COMMIT:PATH"]
    for name, source in named:
        cited = source.document in keys or _PINNED.fullmatch(source.document)
        _demand(cited, message, f"{place}: {name}", source.document, allowed)
        whole = source.how not in ("derived", "implied") or source.derivation
        _demand(whole, "what is derived or implied says from what", f"{place}: {name}", source.how)


def check_numbers(
    published: PublishedClaims, *, place: str, metrics: dict[str, Metric], gpus: dict[str, Gpu]
) -> None:
    """Hold every published number against its metric and its GPU; raises InputError with file and key."""
    numbers: dict[str, Sequence[Claim | RecordClaim | Reference]] = {
        "claim": published.claim,
        "between_records": published.between_records,
        "reference": published.reference,
    }
    for key, listed in numbers.items():
        for number, one in enumerate(listed):
            where = f"{place}:{key}.{number}"
            _check_number(one, where, metrics, gpus)
            if not isinstance(one, Reference) and one.here:
                _check_restatement(one.here, one, published, f"{where}.here", metrics)
            if isinstance(one, RecordClaim) and one.here:
                vendors = sorted({gpus[side.gpu].vendor for side in (one.over, one.under)})
                told, message = len(vendors) > 1, "nothing tells the sides apart on other GPUs"
                allowed = "sides of two vendors, or with other settings; else say why in `why_none`"
                told = told or one.over.settings != one.under.settings
                _demand(told, message, f"{where}.here", f"both sides of {vendors[0]}", allowed)


def _check_number(
    one: Claim | RecordClaim | Reference, where: str, metrics: dict[str, Metric], gpus: dict[str, Gpu]
) -> None:
    require_known(one.metric, metrics, "no such metric", place=f"{where}.metric")
    metric = metrics[one.metric]
    is_ratio = isinstance(one, RecordClaim) or (isinstance(one, Claim) and one.kind == "ratio")
    is_distance = isinstance(one, Claim) and one.is_distance
    _known(one.per, metric.per, f"{where}.per", f"what {metric.id} is counted per")
    if one.formula is not None or metric.formulas:
        formulas = [name for name in metric.formulas if name in FORMULAS]
        _known(one.formula, formulas, f"{where}.formula", f"formula of {metric.id}")
    units = [RATIO] if is_ratio else [metric.unit, *metric.units]
    _known(one.unit, units, f"{where}.unit", f"unit of {metric.id}")
    match one:
        case Reference():
            cards = {"gpu": one.gpu}
        case RecordClaim():
            cards = {"over.gpu": one.over.gpu, "under.gpu": one.under.gpu}
        case _:
            cards = {"hardware.gpu": one.hardware.gpu} if one.hardware else {}
    for key, gpu in cards.items():
        _known(gpu, gpus, f"{where}.{key}", "GPU")
    if not isinstance(one, Reference) and not is_distance and one.better != "equal":
        _known(one.better, [metric.better], f"{where}.better", f"direction of {metric.id}")
    if isinstance(one, Claim):
        _check_kind(one, metric, where)
    if not is_distance:
        limits = None if is_ratio else _limits(gpus[next(iter(cards.values()))], one.per) if cards else {}
        _check_possible(one.value, metric, metric.unit if is_ratio else one.unit, limits, f"{where}.value")


def _check_kind(claim: Claim, metric: Metric, where: str) -> None:
    """Hold a claim against what only claims of its kind have."""
    apart = claim.is_distance and claim.value and (metric.series or metric.fact)
    message = "a curve and a fact are held against each other, so the expected distance is 0"
    _demand(not apart, message, f"{where}.value", claim.value, 0)
    if claim.kind == "parity":
        allowed = "a bound for each precision" if metric.series else "none: no control runs widen it"
        found = ", ".join(claim.bounds) or "none"
        fits = (metric.series is None) != bool(claim.bounds)
        _demand(fits, "a parity of curves has bounds", f"{where}.bounds", found, allowed)
    if claim.kind == "ratio":
        _check_resolution(claim.tolerance, claim.value, f"{where}.tolerance")


def _check_restatement(
    here: Restatement,
    claim: Claim | RecordClaim,
    published: PublishedClaims,
    where: str,
    metrics: dict[str, Metric],
) -> None:
    """Refuse a restatement that nothing could judge or that asks less than its claim."""
    require_known(here.metric, metrics, "no such metric", place=f"{where}.metric")
    metric = metrics[here.metric]
    unit, side = here.unit or metric.unit, here.direction(metric)
    _known(unit, [metric.unit, *metric.units], f"{where}.unit", f"unit of {metric.id}")
    sides = [metric.better, *(["equal"] if claim.kind == "score" else [])]
    _known(here.better or metric.better, sides, f"{where}.better", f"direction of {metric.id}")
    for key, value in (("value", here.value), ("fails_when.value", here.fails_when.value)):
        _check_possible(value, metric, unit, {}, f"{where}.{key}")
    if metric.formulas:
        _known(here.formula or claim.formula, metric.formulas, f"{where}.formula", f"formula of {metric.id}")
    fields = published.fingerprint_of(claim) if isinstance(claim, Claim) else published.fingerprint
    groups = dict.fromkeys((*fields, *(field.partition(".")[0] for field in fields)))
    for field in here.free:
        _known(field, groups, f"{where}.free", "field of the fingerprint")
    neutral = published.neutral_of(claim.id, here=True) if isinstance(claim, Claim) else {}
    freed = [field for field in fields if named_by(here.free, field)]
    tied = ", ".join(field for field in (*freed, *neutral) if metric.decides(field))
    message = f"{metric.id} depends on this field, so here it is neither free nor neutral"
    _demand(not tied, message, f"{where}.free", tied, f"what `depends_on` of {metric.id} does not list")
    if metric.between_points or isinstance(claim, RecordClaim):
        _check_resolution(here.tolerance, here.value, f"{where}.tolerance")
    for kind, computed in (("ratio", metric.between_points), ("parity", metric.between_curves)):
        message, found = f"computed for a claim of kind {kind} alone", f"{metric.id}, kind {claim.kind}"
        _demand(not computed or claim.kind == kind, message, f"{where}.metric", found)
    _check_strength(here, claim.tolerance, where, side)
    _check_counterexample(here, f"{where}.fails_when.value", side)


def _check_strength(here: Restatement, tolerance: float, where: str, side: str) -> None:
    """Refuse a restatement that is not what its derivation gives, or is weaker without saying so."""
    derived, shortfall = f"{here.derived:.4g}, which is {here.derivation}", here.shortfall(side)
    is_derived, message = shortfall >= -ROUNDING, "the value is not the derivation's"
    _demand(is_derived, message, f"{where}.value", here.value, derived)
    message, hint = "weaker than the published statement", "say why in `weaker`, or keep to the derivation"
    strong, wide = here.weaker or shortfall <= ROUNDING, f"{tolerance:g}, the claim's"
    _demand(strong, message, f"{where}.value", here.value, derived, hint=hint)
    narrow = here.weaker or here.tolerance <= tolerance
    _demand(narrow, message, f"{where}.tolerance", here.tolerance, wide, hint=hint)


def _check_counterexample(here: Restatement, place: str, side: str) -> None:
    """Refuse a counterexample that is not what its derivation gives, or that the restatement passes."""
    found = here.fails_when
    sign = -1 if side == "higher" or (side == "equal" and found.value < here.value) else 1
    limit = here.value * (1 + sign * here.tolerance)
    derived = f"{found.derived:.4g}, which is {found.derivation}"
    beyond = f"{'less' if sign < 0 else 'more'} than {limit:.4g}, the value and its tolerance"
    is_derived = math.isclose(found.value, found.derived, rel_tol=ROUNDING)
    _demand(is_derived, "the value is not the derivation's", place, found.value, derived)
    hint = "a restatement that nothing fails is none: say so in `why_none`"
    fails = sign * (found.value - limit) > 0
    _demand(fails, "the restatement passes what should fail it", place, found.value, beyond, hint=hint)
    message = "what fails a restatement is far from its limit, and shows nothing of it"
    _demand(near(found.value, limit), message, place, found.value, f"within a factor of 2 of {limit:.4g}")


def _check_resolution(tolerance: float, value: float, place: str) -> None:
    """Refuse a tolerance on a ratio that is no smaller than the ratio's distance from one."""
    effect = abs(1 - value)
    message = "the tolerance is not smaller than the effect that it judges"
    allowed = f"less than {percent(effect)}, the distance of {value:g} from 1"
    _demand(not effect or tolerance < effect, message, place, percent(tolerance), allowed)


def _check_possible(
    value: float, metric: Metric, unit: str, limits: Mapping[str, float] | None, place: str
) -> None:
    """Refuse a published value that no device reaches.

    Args:
        limits: what the published GPU does at most, by the names of evidence; None where the value
            is a ratio of two numbers, which nothing bounds.
    """
    allowed = f"from {SMALLEST:g} to {LARGEST:g}, in a unit of the metric"
    _demand(SMALLEST <= abs(value) <= LARGEST, "no value of a publication", place, value, allowed)
    most = metric.evidence.most
    if limits is not None and most is not None:
        limit = limits.get(most, math.inf) if isinstance(most, str) else most
        fits = metric.canonical(value, unit) <= limit * (1 + metric.evidence.error)
        _demand(fits, "more than the device can do", place, value, f"up to {limit:g} {metric.unit}")


def _limits(gpu: Gpu, per: Per) -> dict[str, float]:
    """Return what a GPU does at most, by the names that evidence has for it; nothing of a node or a run."""
    cards = {"card": gpu.devices_per_card, "device": 1}.get(per)
    rates = {"peak": gpu.device_peak_flops / 1e12, "bandwidth": gpu.device_bandwidth_bytes_s / 1e9}
    return {name: cards * rate for name, rate in rates.items()} if cards else {}


def _known(found: str | None, allowed: Iterable[str], place: str, what: str) -> None:
    require_known(found or "none", allowed, f"not a {what}", place=place)


def _demand(
    holds: object, message: str, place: str, found: object, allowed: object = None, *, hint: str | None = None
) -> None:
    if not holds:
        raise InputError(message, place=place, found=found, allowed=allowed, hint=hint)
