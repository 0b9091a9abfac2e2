"""A loss curve read from the log of another program: which series, from where, and what was not read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, Field

from twinrun.foundation.errors import InputError, closest
from twinrun.foundation.files import sha256_of_bytes
from twinrun.foundation.manifest import Frozen, load_toml
from twinrun.foundation.text import plural

# Losses of fp32 have no more decimals that say something: a number with so many is not rounded by its log.
_MOST_DECIMALS = 7
_NUMBER = re.compile(
    r"[-+]?(?:\d+(?:[.,]\d*)?|[.,]\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)", re.IGNORECASE
)


class LineFormat(Frozen):
    """How one program prints step and loss."""

    name: str
    source: str
    """Where the program prints the line."""
    sample: str = ""
    """File of tests/parity/samples."""
    patterns: tuple[str, ...] = Field(strict=False)
    """Regular expressions with the groups `step` and `loss`; `epoch`, and `of` how many steps it has."""


class Keys(Frozen):
    """Names that programs give to step and loss, the most usual first."""

    step: tuple[str, ...] = Field(strict=False)
    loss: tuple[str, ...] = Field(strict=False)


class Formats(Frozen):
    """The content of formats.toml."""

    format: tuple[LineFormat, ...] = Field(strict=False)
    keys: Keys


class LossStep(NamedTuple):
    """A loss as it was read."""

    step: int
    loss: float
    decimals: int
    """Decimals with which the log gives the loss; -1 where it gives the number whole."""
    comma: bool = False
    """The text has a comma as decimal sign."""


class LoggedCurve(Frozen):
    """A loss by step, out of a log, with what was said about reading it."""

    # A log may hold losses that are not finite.
    model_config = ConfigDict(allow_inf_nan=True)

    source: str
    """File or folder that was read."""
    format: str
    series: str
    """Name of the series inside the log."""
    steps: tuple[int, ...]
    """Ascending; a step has one loss."""
    values: tuple[float, ...]
    unit: float
    """Smallest difference that the log can show; 0 where it holds numbers whole."""
    digest: str
    """SHA-256 of steps and values."""
    notes: tuple[str, ...] = ()
    """What was not read, or read in a way that a reader must know."""

    @property
    def resolution(self) -> float:
        """Largest relative difference that two equal losses can show because the log rounds them."""
        least = min((abs(one) for one in self.values if math.isfinite(one) and one), default=1.0)
        return self.unit / least

    def in_words(self) -> str:
        """Say what was taken from where."""
        span = f"steps {self.steps[0]} to {self.steps[-1]}"
        notes = "".join(f"; {one}" for one in self.notes)
        count = plural(len(self.steps), "value")
        return f"{self.source}: `{self.series}` of {self.format}, {count}, {span}{notes}"


@cache
def formats() -> Formats:
    """Return the formats that are known, read once: each row of a log asks for their keys."""
    return load_toml(Path(__file__).with_name("formats.toml"), Formats)


def loss_number(text: str) -> LossStep | None:
    """Return the loss that a text says, with step 0; None for no number."""
    text = text.strip().rstrip(".,")
    if not _NUMBER.fullmatch(text):
        return None
    comma = "," in text
    plain = text.replace(",", ".").lower()
    mantissa, _, exponent = plain.partition("e") if "n" not in plain else (plain, "", "")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return LossStep(0, float(plain), decimals, comma)


def point_of(step: Any, loss: Any) -> LossStep | None:
    """Return a point of two values of JSON or of a table; None where one of them is no number."""
    if isinstance(step, str):
        # Some write the last step behind it: 5/100.
        step = float(step.partition("/")[0]) if re.fullmatch(r"\s*\d{1,15}(\.0*|/\d+)?\s*", step) else None
    found = loss_number(loss) if isinstance(loss, str) else _whole(loss)
    if found is None or isinstance(step, bool) or not isinstance(step, int | float):
        return None
    if not math.isfinite(step) or step < 0 or step != int(step):
        return None
    return found._replace(step=int(step))


def _whole(loss: Any) -> LossStep | None:
    if isinstance(loss, bool) or not isinstance(loss, int | float):
        return None
    return loss_number(repr(loss))


def curve_of(
    points: Iterable[LossStep],
    *,
    source: str,
    form: str,
    series: str,
    notes: Iterable[str] = (),
    exact: bool = False,
) -> LoggedCurve:
    """Return the curve of points in the order of the log; the last of a step wins.

    Args:
        exact: the log holds numbers whole, so their decimals say nothing of rounding.

    Raises:
        InputError: there are none.
    """
    losses: dict[int, float] = {}
    most, overlaps, back, commas, last = -99, 0, 0, 0, -1
    for one in points:
        overlaps += one.step in losses
        back += one.step < last and one.step not in losses
        commas += one.comma
        most = max(most, one.decimals)
        losses[one.step] = one.loss
        last = one.step
    if not losses:
        raise no_loss(source)
    steps = tuple(sorted(losses))
    values = tuple(losses[step] for step in steps)
    said = list(notes)
    if overlaps:
        said.append(f"{plural(overlaps, 'step')} logged more than once, the last one is taken")
    if back:
        said.append(f"{plural(back, 'step')} out of order, sorted")
    if commas:
        said.append("commas are read as decimal signs")
    if wrong := sum(not math.isfinite(one) for one in values):
        said.append(f"{plural(wrong, 'value')} not finite")
    whole = exact or most >= _MOST_DECIMALS
    return LoggedCurve(
        source=source,
        format=form,
        series=series,
        steps=steps,
        values=values,
        unit=0.0 if whole else 10.0**-most,
        digest=sha256_of_bytes(repr((steps, values)).encode()),
        notes=tuple(said),
    )


def no_loss(
    source: str, *, series: str = "", known: Iterable[str] = (), lines: Sequence[str] = ()
) -> InputError:
    """Return the error of a log in which no loss was found, with the first of its lines."""
    names = sorted(known)
    if lines:
        return InputError(
            "no step with a loss in it" if not series else f"no line says what {series} asks for",
            place=source,
            found=list(lines),
            allowed=[*(one.name for one in formats().format), "CSV", "JSON", "TensorBoard", "W&B", "records"],
            hint=r"--pattern 'it (?P<step>\d+) .*ce=(?P<loss>[\d.]+)' reads lines of any program",
        )
    if series:
        return InputError(
            "no such series", place=source, found=series, allowed=names, hint=closest(series, names)
        )
    if names:
        hint = f"--series NAME takes one of these: {', '.join(names[:12])}"
        return InputError("no series here is known to be the loss", place=source, found=names[:40], hint=hint)
    return InputError("no step with a loss in it", place=source)


def series_called(names: Iterable[str], wanted: str, *, source: str) -> str:
    """Return which of `names` is the loss: the one asked for, else the most usual; raises InputError."""
    known = dict.fromkeys(names)
    if wanted:
        if wanted not in known:
            raise no_loss(source, series=wanted, known=known)
        return wanted
    for name in formats().keys.loss:
        if name in known:
            return name
    # As W&B exports a column: `RUN - train/loss`, beside it `RUN - train/loss__MIN` and `__MAX`.
    like = [
        one
        for one in known
        if "loss" in one.lower() and not re.search("eval|val|test|aux|__(min|max)$", one, re.IGNORECASE)
    ]
    if len(like) == 1:
        return like[0]
    raise no_loss(source, known=like or known)


def step_key(row: Mapping[str, Any]) -> str | None:
    """Return the key of `row` that is the step, or None."""
    return next((name for name in formats().keys.step if name in row), None)


_COLOUR = re.compile(r"\x1b\[[0-9;]*[a-zA-Z]")
# A format is settled by so many lines of its own.
_SETTLED = 3
_STEP = r"(?i:\b(?:global_step|step|iter|iteration)s?\b[\"']?[ =:/]*)(?P<step>\d+)"
_LOSS = r"[\"']?[ =:|]*[\"']?(?P<loss>[-+\w.,]+)"


def format_of(*, series: str = "", pattern: str = "") -> LineFormat | None:
    """Return the format that a user asks of lines: a number's name, or a regular expression.

    Raises:
        InputError: the expression is none, or has no group `loss`.
    """
    if not series and not pattern:
        return None
    patterns = (pattern,) if pattern else (_STEP, rf"(?<![\w/]){re.escape(series)}{_LOSS}")
    try:
        known = {name for one in patterns for name in re.compile(one).groupindex}
    except re.error as error:
        raise InputError(f"no regular expression: {error}", place="--pattern", found=pattern) from None
    if "loss" not in known:
        hint = r"for example 'it (?P<step>\d+) .*ce=(?P<loss>[\d.]+)'"
        raise InputError("no group `loss`", place="--pattern", found=pattern, hint=hint)
    return LineFormat(
        name=f"--series {series}" if series else "--pattern", source="", sample="", patterns=patterns
    )


def read_lines(lines: Iterable[str], *, source: str, asked: LineFormat | None = None) -> LoggedCurve:
    """Return the curve that a program printed, as asked, else in the format whose lines are first there.

    Lines stream through: memory grows with the number of losses alone.
    """
    readers = [_LineReader(one) for one in ((asked,) if asked else formats().format)]
    first: list[str] = []
    for line in lines:
        plain = _COLOUR.sub("", line) if "\x1b" in line else line
        if len(first) < _SETTLED and plain.strip():
            first.append(plain.strip()[:100])
        for reader in readers:
            reader.read(plain)
        if len(readers) > 1 and (settled := [one for one in readers if len(one.points) >= _SETTLED]):
            readers = settled[:1]
    best = max(readers, key=lambda one: len(one.points))
    if not best.points:
        raise no_loss(source, series=asked.name if asked else "", lines=first)
    name = f"lines ({best.format.name})"
    return curve_of(best.points, source=source, form=name, series="loss", notes=best.notes)


class _LineReader:
    """Collects the losses of one format."""

    def __init__(self, form: LineFormat) -> None:
        self.format = form
        self.points: list[LossStep] = []
        self._patterns = [re.compile(one) for one in form.patterns]
        self._counted = not any("step" in one.groupindex for one in self._patterns)
        self._step: int | None = None
        self._epoch = 0
        self._unread = 0

    @property
    def notes(self) -> list[str]:
        said = ["steps are counted, for the lines have none"] if self._counted else []
        return said + ([f"{plural(self._unread, 'line')} whose loss is no number"] if self._unread else [])

    def read(self, line: str) -> None:
        """Take what a line says."""
        for pattern in self._patterns:
            if not (found := pattern.search(line)):
                continue
            groups = found.groupdict()
            self._epoch = int(groups.get("epoch") or self._epoch)
            if (step := groups.get("step")) and len(step) < 16:
                # Bars count anew in each epoch.
                self._step = int(step.replace(",", "")) + self._epoch * int(groups.get("of") or 0)
            if (text := groups.get("loss")) is not None:
                self._add(loss_number(text))

    def _add(self, loss: LossStep | None) -> None:
        step = len(self.points) + 1 if self._counted else self._step
        if loss is None or step is None:
            self._unread += 1
        else:
            self.points.append(loss._replace(step=step))


def text_lines(stream: Any, *, longest: int = 1 << 20) -> Iterator[str]:
    """Yield the lines of a binary stream, those of bars that write over themselves too.

    A line over `longest` bytes is cut into several.
    """
    rest, first = b"", True
    while block := stream.read(1 << 16):
        *lines, rest = (rest + block.replace(b"\r", b"\n")).split(b"\n")
        if len(rest) > longest:
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield _text(line, first) + "\n"
            first = False
    if rest:
        yield _text(rest, first)


def _text(line: bytes, first: bool) -> str:
    text = line.decode("utf-8", errors="replace")
    return text.removeprefix("\ufeff") if first else text


def log_name(path: Path) -> str:
    """Return a path as the user wrote it, for messages."""
    return os.fspath(path)
