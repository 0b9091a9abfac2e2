"""Arithmetic that a manifest writes out, so that a derived number shows what it is derived from."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

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
