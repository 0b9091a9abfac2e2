"""Probes on this machine: what their programs print or kernel files hold, and the devices in it."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from twinrun.foundation.errors import MachineError
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.vendor import KeyPaths, Probe

FOLDER_MARK = "== "
"""Starts the line that names the folder of the properties after it."""
ProbeRow = Mapping[str, Any]
_NOT_GIVEN = {"", "n/a", "[n/a]", "[not supported]", "not supported", "[unknown error]", "none"}
# A count, or one with its unit such as `65520 MB`.
_COUNT = re.compile(r"([0-9]{1,19})(?: ?[A-Za-z]{1,8})?")
_SHOWN_CHARACTERS = 200
# Lines that look like the start of JSON, warnings in brackets among them.
_JSON_STARTS = 20


class ProbeTimeoutError(MachineError):
    """A probe's program did not end in time."""


def available(probe: Probe) -> bool:
    """Return whether this machine has the program or the files of `probe`."""
    if probe.folders is not None:
        return bool(matching_files(probe.folders))
    return shutil.which(probe.command[0]) is not None


def run_probe(probe: Probe) -> str:
    """Return the output of `probe` on this machine.

    Raises:
        MachineError: the program cannot be started, failed, or ran too long (ProbeTimeoutError).
    """
    return _run(probe) if probe.folders is None else _read_folders(probe.folders, probe.parts)


def matching_files(pattern: str) -> list[Path]:
    """Return the files that the absolute shell `pattern` finds, 2 before 10."""
    return sorted(Path("/").glob(pattern.lstrip("/")), key=lambda path: (len(path.name), path.name))


def _read_folders(pattern: str, parts: tuple[str, ...]) -> str:
    sections = []
    for folder in matching_files(pattern):
        sections.append(f"{FOLDER_MARK}{folder}\n")
        for part in parts:
            # Devices that a container or job may not use are listed, but refuse to be read.
            with contextlib.suppress(OSError):
                sections.append((folder / part).read_text(encoding="utf-8", errors="replace") + "\n")
    return "".join(sections)


def _run(probe: Probe) -> str:
    """Return what the probe's program prints; after its timeout it is killed with all its children."""
    try:
        process = subprocess.Popen(
            probe.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise MachineError(f"cannot be started: {error.strerror}", place=probe.name) from None
    try:
        out, err = process.communicate(timeout=probe.timeout_s)
    except subprocess.TimeoutExpired:
        raise ProbeTimeoutError(f"no answer within {probe.timeout_s:g} s", place=probe.name) from None
    finally:
        # Not poll(): the program may be gone and a child of it still hold the pipes.
        if process.returncode is None:
            _kill(process)
    if process.returncode:
        message = (err.strip() or out.strip() or "(no message)").splitlines()[0]
        raise MachineError(f"exit status {process.returncode}", place=probe.name, found=message)
    return out


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process stuck inside the driver survives the kill: it is left behind rather than waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=1)


class ProbedDevice(Frozen):
    """A device as a probe describes it; null is what the probe does not give."""

    name: str
    memory_bytes: int | None
    arch: str | None
    driver: str | None
    unique_id: str | None
    compute_units: int | None


def parse_output(probe: Probe, text: str) -> tuple[ProbedDevice, ...]:
    """Return the devices in the output of `probe`.

    Raises:
        MachineError: the text is not what the probe's format says.
    """
    document, rows = _READERS[probe.format](probe, text)
    return tuple(_device(probe, row, document) for row in rows if _is_device(probe, row))


def _read_csv(probe: Probe, text: str) -> tuple[ProbeRow, list[ProbeRow]]:
    try:
        lines = [line for line in csv.reader(text.splitlines(), skipinitialspace=True) if line]
    except csv.Error as error:
        raise _malformed(probe, str(error), text) from None
    for line in lines:
        if len(line) != len(probe.columns):
            raise _malformed(probe, f"{len(line)} columns, expected {len(probe.columns)}", ",".join(line))
    return {}, [dict(zip(probe.columns, line, strict=True)) for line in lines]


def _read_json(probe: Probe, text: str) -> tuple[ProbeRow, list[ProbeRow]]:
    document = _first_json(probe, text)
    if isinstance(document, dict):
        chosen = [value for key, value in document.items() if probe.devices.fullmatch(key)]
        entries = [entry for value in chosen for entry in (value if isinstance(value, list) else [value])]
        return document, _mappings(probe, entries, text)
    return {}, _mappings(probe, document, text)


def _first_json(probe: Probe, text: str) -> Any:
    """Return the first JSON object or list that starts a line; tools print warnings around it."""
    if not text.strip():
        return []
    for start in islice(re.finditer(r"^\s*[\[{]", text, re.MULTILINE), _JSON_STARTS):
        try:
            return json.JSONDecoder().raw_decode(text, start.end() - 1)[0]
        except (ValueError, RecursionError):
            continue
    raise _malformed(probe, "no JSON in it", text)


def _mappings(probe: Probe, entries: Iterable[Any], text: str) -> list[ProbeRow]:
    rows = list(entries)
    if not all(isinstance(row, dict) for row in rows):
        raise _malformed(probe, "a device is not a JSON object", text)
    return rows


def _read_properties(_probe: Probe, text: str) -> tuple[ProbeRow, list[ProbeRow]]:
    rows: list[ProbeRow] = []
    for section in text.split(FOLDER_MARK)[1:]:
        pairs = (line.split(maxsplit=1) for line in section.splitlines()[1:])
        rows.append({pair[0]: pair[1] for pair in pairs if len(pair) == 2})
    return {}, rows


_READERS = {"csv": _read_csv, "json": _read_json, "properties": _read_properties}


def _is_device(probe: Probe, row: ProbeRow) -> bool:
    return all(pattern.fullmatch(_at(row, key) or "") for key, pattern in probe.where.items())


def _device(probe: Probe, row: ProbeRow, document: ProbeRow) -> ProbedDevice:
    def fact(paths: KeyPaths) -> str | None:
        found = (_at(place, path) for path in paths for place in (row, document))
        return next((text for text in found if text is not None), None)

    fields = probe.fields
    name, memory, units = fact(fields.name), fact(fields.memory), fact(fields.compute_units)
    if name is None:
        raise _malformed(probe, f"a device without {' or '.join(fields.name)}", str(row))
    return ProbedDevice(
        name=name,
        memory_bytes=None if memory is None else _count(probe, memory) * probe.memory_unit,
        arch=fact(fields.arch),
        driver=fact(fields.driver),
        unique_id=fact(fields.unique_id),
        compute_units=None if units is None else _count(probe, units) // probe.compute_unit_parts,
    )


def _at(place: Any, path: str) -> str | None:
    for key in path.split("."):
        place = place.get(key) if isinstance(place, Mapping) else None
    if not isinstance(place, (str, int, float)):
        return None
    # Broken escapes in JSON become half characters that no file can hold.
    text = str(place).strip().encode("utf-8", "replace").decode()
    return None if text.lower() in _NOT_GIVEN else text


def _count(probe: Probe, text: str) -> int:
    found = _COUNT.fullmatch(text)
    if found is None:
        raise _malformed(probe, "not a count", text)
    return int(found[1])


def _malformed(probe: Probe, why: str, text: str) -> MachineError:
    shown = " ".join(text.split())[:_SHOWN_CHARACTERS]
    return MachineError(f"answer not understood: {why}", place=probe.name, found=shown or "(nothing)")
