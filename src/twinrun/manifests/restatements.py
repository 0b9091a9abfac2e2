"""Restatements: what a claim says in a neutral metric, where the published hardware or scale is not."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.metrics import Metric

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


def _of_derivation(fields: dict[str, Any]) -> float:
    return float(f"{evaluated(fields['derivation']):.4g}")


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

    derivation: Derivation
    """The value from published numbers, as arithmetic, for example `166 / 362`."""
    value: Annotated[float, Field(gt=0, default_factory=_of_derivation)]
    """In the metric and unit of the restatement; what `derivation` gives, in four digits, where left out."""

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


def near(value: float, limit: float) -> bool:
    """Say whether a counterexample shows where a limit is."""
    return limit / NEAR <= value <= limit * NEAR


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
