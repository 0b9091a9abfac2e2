"""Restatements: what a claim says in a neutral metric, where the published hardware or scale is not."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import percent
from twinrun.manifests.metrics import Metric, demand, demand_possible, known_metric, named_by

# A value is written with three or four digits.
ROUNDING = 1e-3
# A value that fails a claim is at most this many times its limit, or that part of it.
NEAR = 2.0
# Longer than any derivation, short enough to be parsed at once.
MAX_LETTERS = 200
# Powers beyond are no derivation but a way to fill the memory.
MAX_EXPONENT = 16
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _arithmetic(text: str) -> str:
    evaluated(text)
    return text


# Numbers joined by + - * / ** and brackets, for example `166 / 362`.
Derivation = Annotated[str, AfterValidator(_arithmetic)]


class Source(Frozen):
    """Where a number stands and how it was read."""

    document: str
    """Key of the publication, see the recipe's README."""
    where: str
    """Table, figure or sentence."""
    how: Literal["read from text", "read from a table", "digitised", "derived", "implied"]
    derivation: str | None = None
    """For derived and implied values: from what."""


class DerivedValue(Frozen):
    """A value with the arithmetic that gives it."""

    value: Annotated[float, Field(gt=0)]
    """What `derivation` gives, rounded, in the metric and unit of the restatement."""
    derivation: Derivation
    """The value from published numbers, as arithmetic, for example `166 / 362`."""

    @property
    def derived(self) -> float:
        """What the derivation gives."""
        return evaluated(self.derivation)


class Counterexample(DerivedValue):
    """What a restatement fails: a slower implementation that is named, or a record that is made up."""

    what: str
    """Which implementation, or what is made up."""
    source: Source | None = None
    """Where the numbers stand; none where they are made up."""


class Restatement(DerivedValue):
    """A claim in a neutral metric, judged at the claim's own points, or at all that a run has instead."""

    statement: str
    """The restated claim in one sentence."""
    metric: str
    """Row of recipes/metrics.toml."""
    unit: str | None = None
    """Unit of the metric; the canonical one where not given."""
    better: Literal["higher", "lower", "equal"] | None = None
    """Direction of the metric, for the reader; `equal` of a score, which fails on either side."""
    formula: str | None = None
    """Formula of the metric; the claim's where not given."""
    measurement: str | None = None
    """Which measurement of a point, where its metric has several."""
    basis: str
    """What the numbers of the derivation are, and where they stand."""
    weaker: str | None = None
    """Why the restatement asks for less than the publication, where it does."""
    tolerance: Annotated[float, Field(gt=0, lt=1)]
    """Relative to `value`."""
    because: str
    """Why this metric and this tolerance."""
    free: tuple[str, ...] = ()
    """Fields of the published fingerprint that may differ; the verdict names those that do. `data` stands for
    all fields whose names begin with `data.`."""
    least_devices: Annotated[int, Field(gt=0)] = 1
    """Points of fewer devices are left out."""
    fails_when: Counterexample
    """What fails it; the tests judge a record of it."""

    def shortfall(self, better: str) -> float:
        """Return by how much of the derived value the restated one asks for less."""
        apart = self.value / self.derived - 1
        return {"higher": -apart, "lower": apart, "equal": abs(apart)}[better]

    def direction(self, metric: Metric) -> Literal["higher", "lower", "equal"]:
        """Return on which side of the value a number is as good: that of the metric, or none."""
        return "equal" if self.better == "equal" else metric.better


class RestatementTerms(NamedTuple):
    """What a restatement is held against: of its claim and of the publication."""

    kind: str
    formula: str | None
    tolerance: float
    fields: tuple[str, ...]
    """Fields of the published fingerprint."""


def check_restatement(
    here: Restatement, terms: RestatementTerms, *, place: str, metrics: dict[str, Metric]
) -> None:
    """Refuse a restatement that nothing could judge or that asks less than its claim; raises InputError."""
    where = place
    metric = known_metric(here.metric, metrics, place=f"{where}.metric")
    what = f"of {metric.id}"
    units = [metric.unit, *metric.units]
    demand(here.unit or metric.unit, units, place=f"{where}.unit", what=f"unit {what}")
    sides = [metric.better, *(["equal"] if terms.kind == "score" else [])]
    demand(here.better or metric.better, sides, place=f"{where}.better", what=f"direction {what}")
    for key, value in (("value", here.value), ("fails_when.value", here.fails_when.value)):
        unit, limits = here.unit or metric.unit, {"one": 1.0}
        demand_possible(value, metric, unit=unit, limits=limits, place=f"{where}.{key}")
    if metric.formulas:
        formula = here.formula or terms.formula
        demand(formula, metric.formulas, place=f"{where}.formula", what=f"formula {what}")
    _check_freed(here, terms.fields, where, metric)
    if metric.between_points:
        demand_resolution(here.tolerance, here.value, place=f"{where}.tolerance")
    computed = {"ratio": metric.between_points, "parity": metric.between_curves}
    if any(found and kind != terms.kind for kind, found in computed.items()):
        allowed = next(kind for kind, found in computed.items() if found)
        raise InputError(
            f"computed for a claim of kind {allowed} alone",
            place=f"{where}.metric",
            found=f"{metric.id} of a claim of kind {terms.kind}",
            allowed=f"claims of kind {allowed}",
        )
    _check_strength(here, terms.tolerance, where, metric)
    _check_counterexample(here, where, metric)


def _check_freed(here: Restatement, fields: Sequence[str], where: str, metric: Metric) -> None:
    """Refuse to free a field that the publication does not have, or that the metric depends on."""
    allowed = dict.fromkeys((*fields, *(field.partition(".")[0] for field in fields)))
    for field in here.free:
        demand(field, allowed, place=f"{where}.free", what="field of the fingerprint")
    if tied := [field for field in fields if named_by(here.free, field) and metric.decides(field)]:
        raise InputError(
            f"{metric.id} depends on this field, so a restatement in it cannot free the field",
            place=f"{where}.free",
            found=", ".join(tied),
            allowed=[field for field in fields if not metric.decides(field)],
        )


def _check_strength(here: Restatement, tolerance: float, where: str, metric: Metric) -> None:
    """Refuse a restatement that is not what its derivation gives, or is weaker without saying so."""
    derived = f"{here.derived:.4g}, which is {here.derivation}"
    shortfall = here.shortfall(here.direction(metric))
    if shortfall < -ROUNDING:
        raise InputError(
            "the value is not the derivation's", place=f"{where}.value", found=here.value, allowed=derived
        )
    weaker = [
        ("value", here.value, derived, shortfall > ROUNDING),
        ("tolerance", here.tolerance, f"{tolerance:g}, the claim's", here.tolerance > tolerance),
    ]
    for key, found, allowed, is_weaker in weaker:
        if is_weaker and here.weaker is None:
            raise InputError(
                "weaker than the published statement",
                place=f"{where}.{key}",
                found=found,
                allowed=allowed,
                hint="say why in `weaker`, or keep to the derivation",
            )


def _check_counterexample(here: Restatement, where: str, metric: Metric) -> None:
    """Refuse a counterexample that is not what its derivation gives, or that the restatement passes."""
    found, place = here.fails_when, f"{where}.fails_when.value"
    if not math.isclose(found.value, found.derived, rel_tol=ROUNDING):
        derived = f"{found.derived:.4g}, which is {found.derivation}"
        raise InputError("the value is not the derivation's", place=place, found=found.value, allowed=derived)
    side, below = here.direction(metric), found.value < here.value
    sign = -1 if side == "higher" or (side == "equal" and below) else 1
    limit = here.value * (1 + sign * here.tolerance)
    if sign * (found.value - limit) <= 0:
        raise InputError(
            "the restatement passes what should fail it",
            place=place,
            found=found.value,
            allowed=f"{'less' if sign < 0 else 'more'} than {limit:.4g}, the value and its tolerance",
            hint="a restatement that nothing fails is none: say so in `why_none`",
        )
    if not near(found.value, limit):
        raise InputError(
            "what fails a restatement is far from its limit, and shows nothing of it",
            place=place,
            found=found.value,
            allowed=f"within a factor of {NEAR:g} of {limit:.4g}, the value and its tolerance",
        )


def near(value: float, limit: float) -> bool:
    """Say whether a counterexample shows where a limit is."""
    return limit / NEAR <= value <= limit * NEAR


def demand_resolution(tolerance: float, value: float, *, place: str) -> None:
    """Refuse a tolerance on a ratio that is no smaller than the ratio's distance from one."""
    effect = abs(1 - value)
    if effect and tolerance >= effect:
        raise InputError(
            "the tolerance is not smaller than the effect that it judges",
            place=place,
            found=percent(tolerance),
            allowed=f"less than {percent(effect)}, the distance of {value:g} from 1",
        )


def evaluated(text: str) -> float:
    """Return the value of numbers joined by + - * / ** and brackets; raises ValueError."""
    if len(text) > MAX_LETTERS:
        raise ValueError(f"longer than {MAX_LETTERS} letters")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError):
        raise ValueError("not numbers joined by + - * / ** and brackets") from None
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](left, right)
        if isinstance(node.op, ast.Pow) and left > 0 and abs(right) <= MAX_EXPONENT:
            return math.pow(left, right)
    raise ValueError("not numbers joined by + - * / ** and brackets")
