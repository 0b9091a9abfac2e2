"""The language in which AMD's ISA documents say what an instruction does, run on all lanes at once.

A branch runs both ways, each where its mask of lanes holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.kernel_code.lanes import CONSTANTS, FUNCTIONS, Bits, UnknownError, cast, raw, sliced, truth, typed

Environment = dict[str, Any]
Mask = Any
Expression = Callable[[Environment], Any]
Statement = Callable[[Environment, Mask], Mask]

_TOKEN = re.compile(
    r"\s*(?:(//[^\n]*)|\d+'[UIBF]\b|(?:\d+')?(?:0x[0-9a-f]+|\d+\.\d+F?|\d+)(?:U?LL|U)?|\w+"
    r"|\*\*|<<|>>|[<>=!]=|<>|&&|\|\||[-+]=|[-+*/%<>=!~&|^?:;,.(){}\[\]])"
)
# Binary operators from the loosest on.
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!=", "<>"),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
    ("**",),
)
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "||": lambda a, b: truth(a) | truth(b),
    "&&": lambda a, b: truth(a) & truth(b),
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<>": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b if np.asarray(a).dtype.kind in "iu" else a / b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: np.asarray(a, np.float64) ** b,
}


@dataclass
class Variable:
    """A variable that was declared with so many elements."""

    kind: str
    width: int
    elements: list[Any]


class Expressions:
    """Reads a text by descent, into functions of what its names stand for."""

    def __init__(self, text: str) -> None:
        self.tokens, at = [], 0
        text = text.strip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise UnknownError(f"{text[at : at + 20]!r} is no word of the language")
            at = match.end()
            if not match[1]:
                self.tokens.append(match[0].strip())
        self.at = 0

    def next(self, wanted: str = "") -> str:
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        if wanted and token != wanted:
            raise UnknownError(f"found {token!r}, wanted {wanted!r}")
        self.at += 1
        return token

    def has(self, *tokens: str) -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at] in tokens:
            self.at += 1
            return True
        return False

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def place(self) -> Callable[[Environment, Any, Mask], None]:
        """Return what sets a variable, a part of one, or memory."""
        name = self.next()
        parts: list[tuple[str, Any]] = []
        while self.peek() in ("[", "."):
            parts.append(self.part())
        return lambda env, value, mask: _set(env, name, parts, value, mask)

    def part(self) -> tuple[str, Any]:
        if self.has("."):
            return "type", self.next()
        self.next("[")
        first = self.expression()
        second = self.expression() if self.has(":") else None
        self.next("]")
        return ("slice", (first, second)) if second else ("index", first)

    def expression(self) -> Expression:
        test = self.binary(0)
        if not self.has("?"):
            return test
        yes, no = self.expression(), (self.next(":"), self.expression())[1]

        def choose(env: Environment) -> Any:
            a, b = _number(yes(env)), _number(no(env))
            return np.where(truth(test(env)), a, b)

        return choose

    def binary(self, level: int) -> Expression:
        if level == len(_LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in _LEVELS[level]:
            left = _joined(_BINARY[self.next()], left, self.binary(level + 1))
        return left

    def unary(self) -> Expression:
        for sign, done in (
            ("-", lambda x: -x),
            ("+", lambda x: x),
            ("~", lambda x: ~x),
            ("!", lambda x: ~truth(x)),
        ):
            if self.has(sign):
                inner = self.unary()
                return lambda env, done=done: done(_number(inner(env)))  # type: ignore[misc]
        return self.postfix()

    def postfix(self) -> Expression:
        value = self.primary()
        while self.peek() in ("[", "."):
            value = _part_of(value, *self.part())
        return value

    def primary(self) -> Expression:
        token = self.next()
        if token == "(":
            inner = self.expression()
            self.next(")")
            return inner
        if token == "{":
            high, low = self.expression(), (self.next(","), self.expression())[1]
            self.next("}")
            return lambda env: _concatenated(high(env), low(env))
        if re.fullmatch(r"\d+'[UIBF]", token):
            width, kind = token.split("'")
            self.next("(")
            inner = self.expression()
            self.next(")")
            return lambda env: cast(inner(env), kind, int(width))
        if token[:1].isdigit():
            number = _literal(token)
            return lambda _: number
        if self.has("("):
            given = [] if self.peek() == ")" else [self.expression()]
            while self.has(","):
                given.append(self.expression())
            self.next(")")
            return lambda env: (env.get(token) or FUNCTIONS[token])(*(one(env) for one in given))
        if not re.fullmatch(r"[A-Za-z_]\w*", token):
            raise UnknownError(f"{token!r} begins no value")
        return lambda env: env[token] if token in env else CONSTANTS[token]


class Statements(Expressions):
    """Reads statements; each returns the lanes that go on."""

    def block(self, *ends: str) -> Statement:
        found: list[Statement] = []
        while self.peek() not in ends:
            found.append(self.statement())
            self.has(";")

        def run(env: Environment, mask: Mask) -> Mask:
            for one in found:
                mask = one(env, mask)
            return mask

        return run

    def statement(self) -> Statement:
        if self.has("if"):
            return self.condition()
        if self.has("for"):
            return self.loop()
        if self.has("declare"):
            return self.declaration()
        if self.has("break"):
            return lambda _, mask: mask & False
        if self.has("return"):
            result = self.expression()

            def leave(env: Environment, mask: Mask) -> Mask:
                _set_name(env, "return", result(env), mask)
                return mask & False

            return leave
        return self.assignment()

    def condition(self) -> Statement:
        test = self.expression()
        self.next("then")
        then = self.block("elsif", "else", "endif")
        other: Statement = lambda _, mask: mask  # noqa: E731
        if self.has("elsif"):
            other = self.condition()
        else:
            if self.has("else"):
                other = self.block("endif")
            self.next("endif")

        def run(env: Environment, mask: Mask) -> Mask:
            chosen = truth(test(env))
            yes, no = mask & chosen, mask & ~chosen
            yes = then(env, yes) if yes.any() else yes
            return yes | (other(env, no) if no.any() else no)

        return run

    def loop(self) -> Statement:
        name = self.next()
        self.next("in")
        first, last = self.expression(), (self.next(":"), self.expression())[1]
        self.next("do")
        body = self.block("endfor")
        self.next("endfor")

        def run(env: Environment, mask: Mask) -> Mask:
            left = mask
            for number in range(int(np.max(first(env))), int(np.max(last(env))) + 1):
                env[name] = number
                left = body(env, left)
                if not left.any():
                    break
            return mask

        return run

    def declaration(self) -> Statement:
        name = self.next()
        self.next(":")
        width, kind = self.next().split("'")
        count = 0
        if self.has("["):
            count = int(self.next())
            self.next("]")

        def run(env: Environment, mask: Mask) -> Mask:
            if name not in env or (count and not isinstance(env[name], (Variable, list))):
                words = -(-int(width) // 32)
                zero = np.zeros(np.shape(mask), np.uint32)
                env[name] = Variable(kind, int(width), [zero] * count) if count else Bits([zero] * words)
            return mask

        return run

    def assignment(self) -> Statement:
        if self.has("{"):
            high, low = self.place(), (self.next(","), self.place())[1]
            self.next("}")
            self.next("=")
            value = self.expression()

            def both(env: Environment, mask: Mask) -> Mask:
                whole = np.atleast_1d(value(env))
                low(env, np.array([int(x) & (1 << 64) - 1 for x in whole], np.uint64), mask)
                high(env, np.array([int(x) >> 64 for x in whole], np.uint64), mask)
                return mask

            return both
        name, at = self.peek(), self.at
        place = self.place()
        if self.has("+="):
            self.at, end = at, self.at
            old = self.postfix()
            self.at = end
            added = self.expression()

            def add(env: Environment, mask: Mask) -> Mask:
                place(env, old(env) + added(env), mask)
                return mask

            return add
        if not self.has("="):
            self.at = at
            called = self.expression()
            return lambda env, mask: (called(env), mask)[1]
        if self.has("lambda"):
            return self.function(name)
        value = self.expression()

        def run(env: Environment, mask: Mask) -> Mask:
            place(env, value(env), mask)
            return mask

        return run

    def function(self, name: str) -> Statement:
        self.next("(")
        names = [self.next()]
        while self.has(","):
            names.append(self.next())
        self.next(")")
        self.next("(")
        body = self.block(")")
        self.next(")")

        def define(env: Environment, mask: Mask) -> Mask:
            def call(*values: Any) -> Any:
                inner = dict(zip(names, values, strict=True))
                body(inner, np.ones(np.shape(mask), bool))
                return inner["return"]

            env[name] = call
            return mask

        return define


def _joined(done: Callable[[Any, Any], Any], left: Expression, right: Expression) -> Expression:
    def join(env: Environment) -> Any:
        a, b = _number(left(env)), _number(right(env))
        kinds = {np.asarray(one).dtype for one in (a, b) if not isinstance(one, int)}
        if kinds == {np.dtype(np.int64), np.dtype(np.uint64)}:
            # NumPy would make floats of these.
            a, b = raw(a), raw(b)
        return done(a, b)

    return join


def _number(value: Any) -> Any:
    return value.whole() if isinstance(value, Bits) else value


def _literal(token: str) -> Any:
    match = re.fullmatch(r"(?:(\d+)')?(0x[0-9a-f]+|\d+\.\d+|\d+)(F|U?LL|U)?", token)
    if match is None:
        raise UnknownError(f"{token!r} is no number")
    if "." in match[2]:
        return np.float32(match[2]) if match[3] else float(match[2])
    number = int(match[2], 0)
    if match[1]:
        return typed(number, "u", int(match[1]))
    types: dict[str, Any] = {"U": np.uint32, "LL": np.int64, "ULL": np.uint64}
    return types[match[3]](number) if match[3] else number


def _concatenated(high: Any, low: Any) -> Any:
    width = 32 * len(low.words) if isinstance(low, Bits) else 8 * np.asarray(low).dtype.itemsize
    return raw(high) << np.uint64(width) | raw(low)


def _kind(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"(b?[fuib])(\d+)", name)
    if match is None:
        raise UnknownError(f"{name!r} is no type")
    return match[1], int(match[2])


def _part_of(value: Expression, what: str, part: Any) -> Expression:
    if what == "type":
        if part == "IEEE":
            return lambda _: np.array([True])
        kind, width = _kind(part)
        if kind == "bf":
            raise UnknownError("bf16 is not known")

        def convert(env: Environment) -> Any:
            found = value(env)
            return found.load(width, kind) if isinstance(found, Access) else typed(found, kind, width)

        return convert
    if what == "slice":
        return lambda env: sliced(value(env), part[0](env), part[1](env))
    return lambda env: _indexed(value(env), part(env))


@dataclass
class Access:
    """A place in memory, whose size a suffix says."""

    memory: Any
    address: Any

    def load(self, width: int, kind: str) -> Any:
        return typed(self.memory.load(self.address, width // 8), kind, width)


@dataclass
class Registers:
    """The vector registers of a lane, by number."""

    file: Any
    lane: Any


def _indexed(value: Any, index: Any) -> Any:
    if isinstance(value, Registers):
        if value.lane is None:
            return Registers(value.file, raw(index).astype(int))
        return value.file[int(raw(index)[0]), value.lane]
    if hasattr(value, "load"):
        return Access(value, index)
    elements = value.elements if isinstance(value, Variable) else value if isinstance(value, list) else None
    if elements is None:
        return raw(value) >> raw(index) & np.uint64(1)
    if np.ndim(index) == 0:
        return elements[int(index)]
    each = np.stack(np.broadcast_arrays(*elements))
    return each[raw(index).astype(int) % len(elements), np.arange(each.shape[1])]


def _set(env: Environment, name: str, parts: list[tuple[str, Any]], value: Any, mask: Mask) -> None:
    width, low, index = 0, 0, []
    float_type = None
    for what, part in parts:
        if what == "type":
            kind, width = _kind(part)
            float_type = f"f{width // 8}" if kind == "f" else float_type
        elif what == "slice":
            high, low = int(part[0](env)), int(part[1](env))
            width = high - low + 1
        else:
            index.append(part(env))
    if float_type:
        value = np.asarray(_number(value)).astype(float_type)
    if name == "MEM":
        env[name].store(index[0], width // 8, raw(value), mask)
    elif name == "VGPR":
        lane, register = raw(index[0]).astype(int), int(raw(index[1])[0])
        env[name].file[register, lane[mask]] = np.broadcast_to(raw(value), mask.shape)[mask]
    elif index and isinstance(env[name], Variable):
        target = env[name]
        if target.kind == "F":
            value = np.asarray(value, f"f{target.width // 8}")
        target.elements[int(index[0])] = np.where(mask, _number(value), target.elements[int(index[0])])
    elif index:
        # A bit a lane, of a scalar register; lanes that are switched off get zero.
        bits = np.where(mask & truth(value), np.uint64(1) << raw(index[0]), np.uint64(0))
        env[name] = Bits.of(np.bitwise_or.reduce(bits, keepdims=True), 2)
    elif isinstance(env.get(name), Bits):
        env[name] = _merged(env[name], low, width or 32 * len(env[name].words), value, mask)
    else:
        _set_name(env, name, value, mask)


def _set_name(env: Environment, name: str, value: Any, mask: Mask) -> None:
    value = _number(value)
    env[name] = np.where(mask, value, env[name]) if name in env and not mask.all() else value


def _merged(old: Bits, low: int, width: int, value: Any, mask: Mask) -> Bits:
    words = list(old.words)
    given = value if isinstance(value, Bits) else Bits.of(value, -(-width // 32))
    whole = width >= 32
    kept = np.uint32(0xFFFFFFFF if whole else ((1 << width) - 1) << low % 32)
    for number, part in enumerate(given.words[: -(-width // 32)]):
        at = low // 32 + number
        now = words[at] & ~kept | part << np.uint32(0 if whole else low % 32) & kept
        words[at] = np.where(mask, now, words[at]).astype(np.uint32)
    return Bits(words)


def read(text: str) -> Statement:
    """Return what a text does; UnknownError where it is prose."""
    return Statements(text).block("")
