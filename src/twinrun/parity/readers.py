"""Readers of loss curves by kind of file: lines, tables, JSON, event files, offline runs of W&B."""

from __future__ import annotations

import csv
import io
import json
import re
import struct
import tempfile
import urllib.parse
import urllib.request
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
    format_of,
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
_ADDRESS = re.compile(r"(https?):/+")
_EVENTS, _OFFLINE = "*tfevents*", "*.wandb"


def read_log(path: Path, *, series: str = "", pattern: str = "") -> LoggedCurve:
    """Return the loss curve of a log.

    Args:
        path: a file, its address on the web, or a folder with event files of TensorBoard, with an offline
            run of W&B or with a trainer_state.json.
        series: name of the column, key, tag or number in a line; the usual names of a loss where empty.
        pattern: regular expression with the groups `step` and `loss`, for lines of any program.

    Raises:
        InputError: no such file, not a regular file, or no loss in it.
    """
    source = log_name(path)
    if _ADDRESS.match(source):
        return _read_address(source, series, pattern)
    asked = format_of(pattern=pattern)
    try:
        if path.is_dir():
            return _read_folder(path, series)
        if ".tfevents." in path.name:
            return _tensorboard([path], series, source=source)
        with open_regular(path, links=True) as raw:
            head = raw.read(_HEAD) or b""
            raw.seek(0)
            with io.BufferedReader(cast("io.RawIOBase", raw)) as stream:
                if asked:
                    return read_lines(text_lines(stream), source=source, asked=asked)
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
    tables = row.values() if isinstance(row, dict) else ()
    if row is not None and "log_history" not in row and not any(map(_is_golden, tables)):
        return _json_lines(stream, series, source=source)
    if row is not None or (start in {b"{", b"["} and (path.suffix == ".json" or first in {b"{", b"["})):
        return _json(read_regular(path, limit=LARGEST_JSON, links=True), series, source=source)
    if sign := _separator(first.decode("utf-8", errors="replace")):
        return _table(stream, sign, series, source=source)
    return read_lines(text_lines(stream), source=source, asked=format_of(series=series))


def _read_address(source: str, series: str, pattern: str) -> LoggedCurve:
    """Return the curve of a public log on the web, which is read once and not kept."""
    address = _ADDRESS.sub(r"\1://", source)
    try:
        # The address begins with http: no file of this machine is opened.
        opened = urllib.request.urlopen(address, timeout=60)  # noqa: S310
        with tempfile.TemporaryDirectory() as folder, opened as answer:
            file = Path(folder, Path(urllib.parse.urlparse(address).path).name or "log")
            file.write_bytes(answer.read(LARGEST_JSON))
            found = read_log(file, series=series, pattern=pattern)
    except OSError as error:
        reason = str(getattr(error, "reason", error))
        raise InputError("the address gives no log", place=address, found=reason) from None
    return found.model_copy(update={"source": address})


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
    rows = csv.DictReader(text_lines(stream), delimiter=sign, skipinitialspace=True)

    def named() -> Iterator[dict[str, Any]]:
        for row in rows:
            if None in row and sign == ",":
                raise InputError(
                    "a row has more fields than the header",
                    place=f"{source}:{rows.line_num}",
                    allowed=f"{len(rows.fieldnames or ())} fields",
                    hint="where decimals have commas, separate columns by semicolons",
                )
            # Exports leave the cell empty at steps that another series has.
            yield {name.strip(): cell for name, cell in row.items() if name and cell}

    return _rows(named(), series, source=source, form="a table", names=rows.fieldnames or ())


def _unread(count: int, what: str) -> list[str]:
    return [f"{plural(count, what)} not read"] if count else []


def _json_lines(stream: IO[bytes], series: str, *, source: str) -> LoggedCurve:
    own = dict[str, None]()

    def rows() -> Iterator[dict[str, Any]]:
        for line in filter(str.strip, text_lines(stream)):
            row = _json_or_none(line)
            # Control runs of ours stand in the file of the run itself.
            if isinstance(row, dict) and not row.get("control"):
                own[str(row.get("point", ""))] = None
            if not isinstance(row, dict) or not row.get("control"):
                yield row if isinstance(row, dict) else {}

    found = _rows(rows(), series, source=source, form="JSON lines")
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
    rows: Iterable[dict[str, Any]], series: str, *, source: str, form: str, names: Iterable[str] = ()
) -> LoggedCurve:
    """Return the curve of rows with keys; rows of other quantities lack the loss, empty ones are unread."""
    loss, points, stepped, unread = series, list[LossStep](), False, 0
    known = dict.fromkeys(names)
    for row in rows:
        unread += not row
        step = step_key(row)
        stepped = stepped or step is not None
        if not loss or loss not in row:
            known |= dict.fromkeys(name for name, value in row.items() if isinstance(value, int | float))
            loss = loss or _first_loss(row, source)
        if step is None or loss not in row:
            continue
        if one := point_of(row[step], row[loss]):
            points.append(one)
        else:
            unread += 1
    if not points and known and not stepped:
        raise InputError(
            "no key here is known to be the step",
            place=source,
            found=list(known)[:40],
            allowed=list(formats().keys.step),
        )
    if not points:
        raise no_loss(source, series=series, known=known)
    return curve_of(points, source=source, form=form, series=loss, notes=_unread(unread, "row"))


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
    if isinstance(data, dict):
        return _golden(data, series, source=source)
    if not isinstance(data, list):
        raise no_loss(source)
    return _rows((one if isinstance(one, dict) else {} for one in data), series, source=source, form=form)


def _is_golden(table: Any) -> bool:
    return isinstance(table, dict) and isinstance(table.get("values"), dict | list)


def _golden(data: dict[str, Any], series: str, *, source: str) -> LoggedCurve:
    """Return a curve of Megatron-LM's golden values: values by step, or a list with its first step."""
    tables = {name: one for name, one in data.items() if _is_golden(one)}
    name = series_called(tables, series, source=source)
    values = tables[name]["values"]
    if isinstance(values, list):
        first, gap = tables[name].get("start_step", 0), tables[name].get("step_interval", 1)
        values = {str(first + place * gap): one for place, one in enumerate(values)}
    points = [found for step, one in values.items() if (found := point_of(step, one))]
    unread = _unread(len(values) - len(points), "value")
    return curve_of(points, source=source, form="golden values", series=name, notes=unread)


def _demand(package: str, install: str, *, source: str) -> None:
    if find_spec(package) is None:
        raise InputError(f"{package} is not installed, which reads this log", place=source, hint=install)


def _tensorboard(files: list[Path], series: str, *, source: str) -> LoggedCurve:
    """Return the scalars of one tag, of all files in the order of their names, which have their times."""
    _demand("tensorboard", 'pip install "twinrun[track]"', source=source)
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader, RawEventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found: dict[str, list[LossStep]] = {}
    notes: list[str] = []
    for file in files:
        with open_regular(file, links=True):
            pass
        # A length and two checksums stand around each event.
        read = sum(len(event) + 16 for event in RawEventFileLoader(str(file)).Load())
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    # An event file holds fp32.
                    number_of = float(make_ndarray(value.tensor).reshape(-1)[0])
                    found.setdefault(value.tag, []).append(LossStep(event.step, number_of, -1))
        if read < file.stat().st_size:
            notes.append(f"{file.name} is damaged or cut at byte {read} of {file.stat().st_size}")
    tag = series_called(found, series, source=source)
    return curve_of(found[tag], source=source, form="TensorBoard", series=tag, notes=notes, exact=True)


def _offline(stream: IO[bytes], series: str, *, source: str) -> LoggedCurve:
    """Return the history of an offline run of W&B."""
    _demand("wandb", "pip install wandb", source=source)
    from wandb.proto.wandb_internal_pb2 import Record

    rows: list[dict[str, Any]] = []
    ended = False
    for content in log_entries(stream):
        line = Record()
        line.ParseFromString(content)
        ended = ended or line.HasField("exit")
        if not line.HasField("history"):
            continue
        row: dict[str, Any] = {"_step": line.history.step.num}
        for item in line.history.item:
            row[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        rows.append(row)
    found = _rows(rows, series, source=source, form="a W&B offline run")
    notes = (
        found.notes
        if ended
        else (*found.notes, "the file ends, or is damaged, before the end of the run: later steps may lack")
    )
    return found.model_copy(update={"unit": 0.0, "notes": notes})


def log_entries(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the entries of a file in LevelDB's log format, as W&B writes it: blocks of 32 KiB, 7 bytes ahead.

    An entry that is cut off, as of a run that still goes on, or is not what its checksum says ends the file.
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
            return
        place += header + length
        # 1 is a whole entry, 2 the first part of one, 3 a further and 4 the last.
        parts = content if kind in {1, 2} else parts + content
        if kind in {1, 4}:
            yield parts
