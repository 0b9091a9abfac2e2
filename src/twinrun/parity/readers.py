"""Readers of loss curves by kind of file: lines, tables, JSON, event files, offline runs of W&B."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import struct
import tempfile
import urllib.parse
import urllib.request
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import open_regular, parse_json, read_regular
from twinrun.parity.logs import (
    LoggedCurve,
    format_of,
    loss_number,
    no_loss,
    read_lines,
    rows_curve,
    series_called,
    step_key,
    text_lines,
)

# A file of one JSON value is read whole.
LARGEST_JSON = 1 << 28
_HEAD = 1 << 16
_ADDRESS = re.compile(r"(https?):/+")
_EVENTS = "*tfevents*"
# What is looked for in a folder; W&B and TensorBoard also below it.
_LOGS = (_EVENTS, "*.wandb", "trainer_state.json", "metrics.jsonl")


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
    source = os.fspath(path)
    if _ADDRESS.match(source):
        return _read_address(source, series, pattern)
    asked = format_of(pattern=pattern)
    try:
        files = _files_of(path) if path.is_dir() else [path]
        if ".tfevents." in files[0].name:
            return _tensorboard(files, series, source=source)
        with open_regular(files[0], links=files == [path]) as raw:
            head = raw.read(_HEAD) or b""
            raw.seek(0)
            with io.BufferedReader(cast("io.RawIOBase", raw)) as stream:
                if asked:
                    return read_lines(text_lines(stream), source=source, asked=asked)
                return _read_file(stream, head.removeprefix(BOM_UTF8), files[0], series, source)
    except OSError as error:
        allowed = "a record, a run folder, or a log of another program"
        raise InputError("not a log", place=source, found=error.strerror, allowed=allowed) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not a log: {error}", place=source) from None


def _files_of(folder: Path) -> list[Path]:
    """Return the log of a run in its folder; a resumed run has several event files in one."""
    for name in _LOGS:
        found = sorted(folder.rglob(name) if "*" in name else folder.glob(name), key=lambda one: one.name)
        runs = {one.parent for one in found} if name == _EVENTS else found
        if len(runs) > 1:
            names = sorted(map(str, runs))
            raise InputError("several runs", place=str(folder), found=names, hint="name one of them")
        if found:
            return found
    hint = "name the file itself"
    raise InputError("no log in this folder", place=str(folder), allowed=list(_LOGS), hint=hint)


def _read_file(stream: IO[bytes], head: bytes, path: Path, series: str, source: str) -> LoggedCurve:
    if head.startswith(b":W&B"):
        return _offline(stream, series, source=source)
    if b"\0" in head:
        raise InputError("neither text nor a log that is known", place=source, found="zero bytes")
    start, first = head.lstrip()[:1], head.split(b"\n", 1)[0].strip()
    # A dictionary as Python prints it is no JSON.
    row = _json_or_none(first) if start == b"{" else None
    tables = row.values() if isinstance(row, dict) else ()
    if row is not None and "log_history" not in row and not any(map(_is_golden, tables)):
        return rows_curve(_json_rows(stream), series, source=source, form="JSON lines")
    if row is not None or (start in {b"{", b"["} and (path.suffix == ".json" or first in {b"{", b"["})):
        return _json(read_regular(path, limit=LARGEST_JSON, links=True), series, source=source)
    if sign := _separator(first.decode("utf-8", errors="replace")):
        table = csv.DictReader(text_lines(stream), delimiter=sign, skipinitialspace=True)
        rows, names = _table_rows(table, sign, source), table.fieldnames or ()
        return rows_curve(rows, series, source=source, form="a table", names=names)
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


def _table_rows(rows: csv.DictReader[str], sign: str, source: str) -> Iterator[dict[str, Any]]:
    for row in rows:
        if None in row and sign == ",":
            place, hint = (
                f"{source}:{rows.line_num}",
                "where decimals have commas, separate columns by semicolons",
            )
            raise InputError("a row has more fields than the header", place=place, hint=hint)
        # Exports leave the cell empty at steps that another series has.
        yield {name.strip(): cell for name, cell in row.items() if name and cell}


def _json_rows(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    for line in filter(str.strip, text_lines(stream)):
        row = _json_or_none(line)
        # Control runs of ours stand in the file of the run itself.
        if not isinstance(row, dict) or not row.get("control"):
            yield row if isinstance(row, dict) else {}


def _json(content: bytes, series: str, *, source: str) -> LoggedCurve:
    data, form = parse_json(content), "JSON"
    if isinstance(data, dict) and isinstance(data.get("log_history"), list):
        data, form = data["log_history"], "trainer_state.json"
    if isinstance(data, dict):
        tables = {name: one for name, one in data.items() if _is_golden(one)}
        series, form = series_called(tables, series, source=source), "golden values"
        data = _golden_rows(tables[series], series)
    if not isinstance(data, list):
        raise no_loss(source)
    rows = (one if isinstance(one, dict) else {} for one in data)
    return rows_curve(rows, series, source=source, form=form)


def _is_golden(table: Any) -> bool:
    return isinstance(table, dict) and isinstance(table.get("values"), dict | list)


def _golden_rows(table: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return rows of Megatron-LM's golden values: values by step, or a list with its first step."""
    values = table["values"]
    if isinstance(values, list):
        first, gap = table.get("start_step", 0), table.get("step_interval", 1)
        values = {str(first + place * gap): one for place, one in enumerate(values)}
    return [{"step": step, name: one} for step, one in values.items()]


def _demand(package: str, install: str, *, source: str) -> None:
    if find_spec(package) is None:
        raise InputError(f"{package} is not installed, which reads this log", place=source, hint=install)


def _tensorboard(files: list[Path], series: str, *, source: str) -> LoggedCurve:
    """Return the scalars of one tag, of all files in the order of their names, which have their times."""
    _demand("tensorboard", 'pip install "twinrun[track]"', source=source)
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader, RawEventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found: dict[str, list[dict[str, Any]]] = {}
    notes: list[str] = []
    for file in files:
        with open_regular(file, links=True):
            pass
        # A length and two checksums stand around each event.
        read = sum(len(event) + 16 for event in RawEventFileLoader(str(file)).Load())
        if read < file.stat().st_size:
            notes.append(f"{file.name} is damaged or cut at byte {read} of {file.stat().st_size}")
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    number = float(make_ndarray(value.tensor).reshape(-1)[0])
                    found.setdefault(value.tag, []).append({"step": event.step, value.tag: number})
    tag = series_called(found, series, source=source)
    # An event file holds fp32.
    return rows_curve(found[tag], tag, source=source, form="TensorBoard", notes=notes, exact=True)


def _offline(stream: IO[bytes], series: str, *, source: str) -> LoggedCurve:
    """Return the history of an offline run of W&B."""
    _demand("wandb", "pip install wandb", source=source)
    from wandb.proto.wandb_internal_pb2 import Record

    notes = ["the file ends, or is damaged, before the end of the run: later steps may lack"]

    def rows() -> Iterator[dict[str, Any]]:
        for content in log_entries(stream):
            line = Record()
            line.ParseFromString(content)
            if line.HasField("exit"):
                notes.clear()
            if line.HasField("history"):
                items = {one.key or ".".join(one.nested_key): one.value_json for one in line.history.item}
                yield {"_step": line.history.step.num} | {key: json.loads(one) for key, one in items.items()}

    return rows_curve(rows(), series, source=source, form="a W&B offline run", notes=notes, exact=True)


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
        whole = len(content) == length and kind != 0
        if not whole or zlib.crc32(content, zlib.crc32(head[-1:])) != checksum:
            return
        place += header + length
        # 1 is a whole entry, 2 the first part of one, 3 a further and 4 the last.
        parts = content if kind in {1, 2} else parts + content
        if kind in {1, 4}:
            yield parts
