"""Readers of loss curves by kind of file: lines, tables, JSON, event files, offline runs of W&B."""

from __future__ import annotations

import csv
import io
import json
import struct
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import open_regular, parse_json, read_regular
from twinrun.foundation.text import plural
from twinrun.parity.logs import (
    LoggedCurve,
    LossStep,
    curve_of,
    formats,
    log_name,
    loss_number,
    no_loss,
    point_of,
    read_lines,
    series_called,
    step_key,
    text_lines,
)

# A file of one JSON value is read whole.
LARGEST_JSON = 1 << 28
_HEAD = 1 << 16
_EVENTS, _OFFLINE = "*tfevents*", "*.wandb"


def read_log(path: Path, *, series: str = "") -> LoggedCurve:
    """Return the loss curve of a log.

    Args:
        path: a file, or a folder with event files of TensorBoard, with an offline run of W&B or with a
            trainer_state.json.
        series: name of the column, key or tag; the usual names of a training loss where empty.

    Raises:
        InputError: no such file, not a regular file, or no loss in it.
    """
    source = log_name(path)
    try:
        if path.is_dir():
            return _read_folder(path, series)
        if ".tfevents." in path.name:
            return _tensorboard([path], series, source=source)
        with open_regular(path, links=True) as raw:
            head = raw.read(_HEAD) or b""
            raw.seek(0)
            with io.BufferedReader(cast("io.RawIOBase", raw)) as stream:
                return _read_file(stream, head, path, series)
    except OSError as error:
        allowed = "a record, a run folder, or a log of another program"
        raise InputError("not a log", place=source, found=error.strerror, allowed=allowed) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not a log: {error}", place=source) from None


def _read_folder(path: Path, series: str) -> LoggedCurve:
    if events := sorted(path.rglob(_EVENTS), key=lambda one: one.name):
        if len(folders := {one.parent for one in events}) > 1:
            names = sorted(str(one) for one in folders)
            raise InputError(
                "event files of several runs", place=log_name(path), found=names, hint="name one folder"
            )
        return _tensorboard(events, series, source=log_name(path))
    if offline := sorted(path.rglob(_OFFLINE)):
        if len(offline) > 1:
            raise InputError(
                "several offline runs", place=log_name(path), found=offline, hint="name one folder"
            )
        with open_regular(offline[0]) as raw:
            return _offline(raw, series, source=log_name(path))
    for name in ("trainer_state.json", "metrics.jsonl"):
        if (path / name).exists():
            return read_log(path / name, series=series)
    raise InputError(
        "no log in this folder",
        place=log_name(path),
        allowed=[f"{_EVENTS} of TensorBoard", f"{_OFFLINE} of W&B", "trainer_state.json", "metrics.jsonl"],
        hint="name the file itself",
    )


def _read_file(stream: IO[bytes], head: bytes, path: Path, series: str) -> LoggedCurve:
    source = log_name(path)
    head = head.removeprefix(BOM_UTF8)
    if head.startswith(b":W&B"):
        return _offline(stream, series, source=source)
    if b"\0" in head:
        raise InputError("neither text nor a log that is known", place=source, found="zero bytes")
    start = head.lstrip()[:1]
    first = head.split(b"\n", 1)[0].strip()
    # A dictionary as Python prints it is no JSON.
    row = _json_or_none(first) if start == b"{" else None
    if row is not None and "log_history" not in row:
        return _json_lines(stream, series, source=source)
    if row is not None or (start in {b"{", b"["} and (path.suffix == ".json" or first in {b"{", b"["})):
        return _json(read_regular(path, limit=LARGEST_JSON, links=True), series, source=source)
    if sign := _separator(first.decode("utf-8", errors="replace")):
        return _table(stream, sign, series, source=source)
    return read_lines(text_lines(stream), source=source)


def _json_or_none(text: bytes | str) -> Any:
    """Return what a line of JSON says, None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _separator(header: str) -> str:
    """Return what separates the columns of a header, empty where the line is none."""
    for sign in ("\t", ";", ","):
        names = [one.strip().strip('"') for one in header.split(sign)]
        if len(names) > 1 and step_key(dict.fromkeys(names)) and not any(map(loss_number, names)):
            return sign
    return ""


def _table(stream: IO[bytes], sign: str, series: str, *, source: str) -> LoggedCurve:
    rows = csv.reader(text_lines(stream), delimiter=sign)
    header = [name.strip() for name in next(rows)]
    step = step_key(dict.fromkeys(header))
    assert step
    loss = series_called((name for name in header if name != step), series, source=source)
    places, unread = (header.index(step), header.index(loss)), [0]

    def points() -> Iterator[LossStep]:
        for row in rows:
            if len(row) > len(header) and sign == ",":
                raise InputError(
                    "a row has more fields than the header",
                    place=f"{source}:{rows.line_num}",
                    found=sign.join(row),
                    allowed=f"{len(header)} fields",
                    hint="where decimals have commas, separate columns by semicolons",
                )
            one = point_of(*(row[place] for place in places)) if len(row) > max(places) else None
            # Exports leave the cell empty at steps that another series has.
            if one is None:
                unread[0] += any(row) and (len(row) <= max(places) or bool(row[places[1]].strip()))
            else:
                yield one

    found = list(points())
    return curve_of(found, source=source, form="a table", series=loss, notes=_unread(unread[0], "row"))


def _unread(count: int, what: str) -> list[str]:
    return [f"{plural(count, what)} not read"] if count else []


def _json_lines(stream: IO[bytes], series: str, *, source: str) -> LoggedCurve:
    unread, own = [0], dict[str, None]()

    def rows() -> Iterator[dict[str, Any]]:
        for line in text_lines(stream):
            if not line.strip():
                continue
            row = _json_or_none(line)
            if not isinstance(row, dict):
                unread[0] += 1
            # Control runs of ours stand in the file of the run itself.
            elif not row.get("control"):
                own[str(row.get("point", ""))] = None
                yield row

    found = _rows(rows(), series, source=source, form="JSON lines", unread=unread)
    if len(own) > 1:
        raise InputError(
            "lines of several points, each with steps of its own",
            place=source,
            found=list(own)[:12],
            allowed="lines of one",
            hint="name the run folder or its record",
        )
    return found


def _rows(
    rows: Iterable[dict[str, Any]], series: str, *, source: str, form: str, unread: list[int]
) -> LoggedCurve:
    """Return the curve of rows with keys; rows of other quantities lack the loss."""
    loss, names, points, stepped = series, dict[str, None](), list[LossStep](), False
    for row in rows:
        step = step_key(row)
        stepped = stepped or step is not None
        if not loss or loss not in row:
            names |= dict.fromkeys(name for name, value in row.items() if isinstance(value, int | float))
            loss = loss or _first_loss(row, source)
        if step is None or loss not in row:
            continue
        if one := point_of(row[step], row[loss]):
            points.append(one)
        else:
            unread[0] += 1
    if not points and names and not stepped:
        raise InputError(
            "no key here is known to be the step",
            place=source,
            found=list(names)[:40],
            allowed=list(formats().keys.step),
        )
    if not points:
        raise no_loss(source, series=series, known=names)
    return curve_of(points, source=source, form=form, series=loss, notes=_unread(unread[0], "row"))


def _first_loss(row: dict[str, Any], source: str) -> str:
    try:
        return series_called((name for name in row if name != step_key(row)), "", source=source)
    except InputError:
        return ""


def _json(content: bytes, series: str, *, source: str) -> LoggedCurve:
    data = parse_json(content)
    form = "JSON"
    if isinstance(data, dict) and isinstance(data.get("log_history"), list):
        data, form = data["log_history"], "trainer_state.json"
    if not isinstance(data, list):
        raise no_loss(source)
    rows = [one for one in data if isinstance(one, dict)]
    return _rows(rows, series, source=source, form=form, unread=[len(data) - len(rows)])


def _demand(package: str, install: str, *, source: str) -> None:
    if find_spec(package) is None:
        raise InputError(f"{package} is not installed, which reads this log", place=source, hint=install)


def _tensorboard(files: list[Path], series: str, *, source: str) -> LoggedCurve:
    """Return the scalars of one tag, of all files in the order of their names, which have their times."""
    _demand("tensorboard", 'pip install "twinrun[track]"', source=source)
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found: dict[str, list[LossStep]] = {}
    for file in files:
        with open_regular(file, links=True):
            pass
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    # An event file holds fp32.
                    number_of = float(make_ndarray(value.tensor).reshape(-1)[0])
                    found.setdefault(value.tag, []).append(LossStep(event.step, number_of, -1))
    tag = series_called(found, series, source=source)
    return curve_of(found[tag], source=source, form="TensorBoard", series=tag, exact=True)


def _offline(stream: IO[bytes], series: str, *, source: str) -> LoggedCurve:
    """Return the history of an offline run of W&B."""
    _demand("wandb", "pip install wandb", source=source)
    from wandb.proto.wandb_internal_pb2 import Record

    rows: list[dict[str, Any]] = []
    ended = False
    for content in log_entries(stream, source=source):
        line = Record()
        line.ParseFromString(content)
        ended = ended or line.HasField("exit")
        if not line.HasField("history"):
            continue
        row: dict[str, Any] = {"_step": line.history.step.num}
        for item in line.history.item:
            row[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        rows.append(row)
    found = _rows(rows, series, source=source, form="a W&B offline run", unread=[0])
    notes = found.notes if ended else (*found.notes, "the file has no end of the run: later steps may lack")
    return found.model_copy(update={"unit": 0.0, "notes": notes})


def log_entries(stream: IO[bytes], *, source: str) -> Iterator[bytes]:
    """Yield the entries of a file in LevelDB's log format, as W&B writes it: blocks of 32 KiB, 7 bytes ahead.

    An entry that is cut off, as of a run that still goes on, ends the file.

    Raises:
        InputError: a part of an entry is not what its checksum says.
    """
    size, header = 1 << 15, 7
    # W&B's own header is the start of the first block.
    place, parts = len(stream.read(header)), b""
    while True:
        if (left := size - place % size) < header:
            place += len(stream.read(left))
        head = stream.read(header)
        if len(head) < header:
            return
        checksum, length, kind = struct.unpack("<IHB", head)
        content = stream.read(length)
        if len(content) < length or kind == 0:
            return
        if zlib.crc32(content, zlib.crc32(head[-1:])) != checksum:
            raise InputError("a part of the file is damaged", place=source, found=f"at byte {place}")
        place += header + length
        # 1 is a whole entry, 2 the first part of one, 3 a further and 4 the last.
        parts = content if kind in {1, 2} else parts + content
        if kind in {1, 4}:
            yield parts
