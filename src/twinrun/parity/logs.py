"""A loss curve read from the log of another program: which series, from where, and what was not read."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from pydantic import ConfigDict, Field

from twinrun.foundation.errors import InputError, closest
from twinrun.foundation.manifest import Frozen, load_toml
from twinrun.foundation.text import plural

# Losses of fp32 have no more decimals that say something: a number with so many is not rounded by its log.
_MOST_DECIMALS = 7
_NUMBER = re.compile(
    r"[-+]?(?:\d+(?:[.,]\d*)?|[.,]\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)", re.IGNORECASE
)
# Some write the last step behind it: 5/100.
_STEP_TEXT = re.compile(r"\s*\d{1,15}(\.0*|/\d+)?\s*")


class LineFormat(Frozen):
    """How one program prints step and loss."""

    name: str
    source: str = ""
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
    notes: tuple[str, ...] = ()
    """What was not read, or read in a way that a reader must know."""

    @property
    def resolution(self) -> float:
        """Largest relative difference that two equal losses can show because the log rounds them."""
        least = min((abs(one) for one in self.values if math.isfinite(one) and one), default=1.0)
        return self.unit / least

    def in_words(self) -> str:
        """Say what was taken from where."""
        span = f"{plural(len(self.steps), 'value')}, steps {self.steps[0]} to {self.steps[-1]}"
        return "; ".join([f"{self.source}: `{self.series}` of {self.format}, {span}", *self.notes])


@cache
def formats() -> Formats:
    """Return the formats that are known, read once: each row of a log asks for their keys."""
    return load_toml(Path(__file__).with_name("formats.toml"), Formats)


def loss_number(text: str) -> LossStep | None:
    """Return the loss that a text says, with step 0; None for no number."""
    text = text.strip().rstrip(".,")
    if not _NUMBER.fullmatch(text):
        return None
    plain = text.replace(",", ".").lower()
    mantissa, _, exponent = plain.partition("e") if "n" not in plain else (plain, "", "")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return LossStep(0, float(plain), decimals, "," in text)


def point_of(step: Any, loss: Any) -> LossStep | None:
    """Return a point of two values of JSON or of a table; None where one of them is no number."""
    if isinstance(step, str) and _STEP_TEXT.fullmatch(step):
        step = float(step.partition("/")[0])
    if isinstance(step, bool | str) or isinstance(loss, bool) or not isinstance(step, int | float):
        return None
    found = loss_number(loss if isinstance(loss, str) else repr(loss))
    whole = math.isfinite(step) and step >= 0 and step == int(step)
    return found._replace(step=int(step)) if found and whole else None


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
    taken = list(points)
    losses = {one.step: one.loss for one in taken}
    if not losses:
        raise no_loss(source)
    steps, values = zip(*sorted(losses.items()), strict=True)
    first = list(losses)
    counts = (
        (len(taken) - len(losses), "step", "logged more than once, the last one is taken"),
        (sum(map(int.__lt__, first[1:], first)), "step", "out of order, sorted"),
        (sum(not math.isfinite(one) for one in values), "value", "not finite"),
    )
    said = [*notes, *(f"{plural(count, noun)} {what}" for count, noun, what in counts if count)]
    said += ["commas are read as decimal signs"] if any(one.comma for one in taken) else []
    most = max(one.decimals for one in taken)
    return LoggedCurve(
        source=source,
        format=form,
        series=series,
        steps=steps,
        values=values,
        unit=0.0 if exact or most >= _MOST_DECIMALS else 10.0**-most,
        notes=tuple(said),
    )


def no_loss(source: str, known: Iterable[str] = (), *, series: str = "") -> InputError:
    """Return the error of a log in which no loss was found, or not the one that was asked for."""
    names = sorted(known)
    if series:
        hint = closest(series, names)
        return InputError("no such series", place=source, found=series, allowed=names, hint=hint)
    hint = f"--series NAME takes another loss; the step is called one of {', '.join(formats().keys.step)}"
    message = "no step with a loss in it"
    return InputError(message, place=source, found=names[:40] or None, hint=hint if names else None)


def usual_loss(names: Iterable[str]) -> str:
    """Return which of `names` is the loss, the most usual first; empty where none is, or several may be."""
    known = dict.fromkeys(names)
    # As W&B exports a column: `RUN - train/loss`, beside it `RUN - train/loss__MIN` and `__MAX`.
    other = re.compile("eval|val|test|aux|__(min|max)$", re.IGNORECASE)
    like = [one for one in known if "loss" in one.lower() and not other.search(one)]
    found = next((name for name in formats().keys.loss if name in known), "")
    return found or (like[0] if len(like) == 1 else "")


def series_called(names: Iterable[str], wanted: str, *, source: str) -> str:
    """Return the series that is asked for, else the usual loss; raises InputError."""
    known = dict.fromkeys(names)
    found = wanted or usual_loss(known)
    if found not in known:
        raise no_loss(source, known, series=wanted)
    return found


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
    if not pattern:
        patterns = (_STEP, rf"(?<![\w/]){re.escape(series)}{_LOSS}")
        return LineFormat(name=f"--series {series}", patterns=patterns)
    try:
        if "loss" not in re.compile(pattern).groupindex:
            raise re.error("no group `loss`")
    except re.error as error:
        hint = r"for example 'it (?P<step>\d+) .*ce=(?P<loss>[\d.]+)'"
        message = f"no regular expression of a loss: {error}"
        raise InputError(message, place="--pattern", found=pattern, hint=hint) from None
    return LineFormat(name="--pattern", patterns=(pattern,))


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
    if best.points:
        form = f"lines ({best.format.name})"
        return curve_of(best.points, source=source, form=form, series="loss", notes=best.notes())
    raise InputError(
        f"no line says what {asked.name} asks for" if asked else "no step with a loss in it",
        place=source,
        found=first,
        allowed=[*(one.name for one in formats().format), "CSV", "JSON", "TensorBoard", "W&B", "records"],
        hint=r"--pattern 'it (?P<step>\d+) .*ce=(?P<loss>[\d.]+)' reads lines of any program",
    )


class _LineReader:
    """Collects the losses of one format."""

    def __init__(self, form: LineFormat) -> None:
        self.format, self.points = form, list[LossStep]()
        self._patterns = [re.compile(one) for one in form.patterns]
        self._counted = not any("step" in one.groupindex for one in self._patterns)
        self._step: int | None = None
        self._epoch = self._unread = 0

    def notes(self) -> Iterator[str]:
        """Yield what a reader of the curve must know."""
        if self._counted:
            yield "steps are counted, for the lines have none"
        if self._unread:
            yield f"{plural(self._unread, 'line')} whose loss is no number"

    def read(self, line: str) -> None:
        """Take what a line says."""
        for found in filter(None, (pattern.search(line) for pattern in self._patterns)):
            groups = found.groupdict()
            self._epoch = int(groups.get("epoch") or self._epoch)
            if (step := groups.get("step")) and len(step) < 16:
                # Bars count anew in each epoch.
                self._step = int(step.replace(",", "")) + self._epoch * int(groups.get("of") or 0)
            if (text := groups.get("loss")) is None:
                continue
            place = len(self.points) + 1 if self._counted else self._step
            loss = loss_number(text)
            if loss is None or place is None:
                self._unread += 1
            else:
                self.points.append(loss._replace(step=place))


def text_lines(stream: IO[bytes], *, longest: int = 1 << 20) -> Iterator[str]:
    """Yield the lines of a binary stream, those of bars that write over themselves too; long ones are cut."""
    with io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace") as text:
        while line := text.readline(longest):
            yield line


def rows_curve(
    rows: Iterable[dict[str, Any]],
    series: str,
    *,
    source: str,
    names: Iterable[str] = (),
    notes: Sequence[str] = (),
    **told: Any,
) -> LoggedCurve:
    """Return the curve of rows with keys; rows of other quantities lack the loss, empty ones are unread.

    Args:
        names: all that the rows may have, where it is known.
        notes: see `LoggedCurve`; what the rows add to them while they are read is said too.
        told: see `curve_of`.
    """
    loss, points, unread = series, list[LossStep](), 0
    known, own = dict.fromkeys(names), dict[str, None]()
    for row in rows:
        unread += not row
        step = step_key(row)
        if not loss or loss not in row:
            known |= dict.fromkeys(name for name, value in row.items() if isinstance(value, int | float))
            loss = loss or usual_loss(name for name in row if name != step)
        if step is not None and loss in row:
            own[str(row.get("point", ""))] = None
            one = point_of(row[step], row[loss])
            points += [one] if one else []
            unread += one is None
    if len(own) > 1:
        hint = "name the run folder or its record"
        raise InputError("lines of several points", place=source, found=list(own)[:12], hint=hint)
    if not points:
        raise no_loss(source, known, series=series)
    said = [f"{plural(unread, 'row')} not read", *notes] if unread else notes
    return curve_of(points, source=source, series=loss, notes=said, **told)
