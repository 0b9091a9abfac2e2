"""Data sets as the ranks read them: prepared once for each source, sequence length and interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Engine, Workspace, run_to_end
from twinrun.foundation.errors import MachineError, RunError
from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.processes import last_lines
from twinrun.protocol.training import DataSource

INDEX = "corpus.json"
# The module that prepares data where the ranks run.
PREPARE = "twinrun.train.prepare"
# Counts up when ranks ask for files that preparation did not write before; older folders are made anew.
_FORMAT = 2


def data_folder(*, data: Path, source: DataSource, name: str, sequence: int, python: str) -> Path:
    """Return where the prepared data stands; the standard library differs between interpreters."""
    pinned = source.model_dump(mode="json", exclude={"source"})
    mark = sha256_of_bytes(canonical_json([_FORMAT, pinned, sequence]).encode())[:12]
    kind = f"{name}-python{python}" if source.kind == "standard-library" else name
    return data / f"{kind}-{sequence}-{mark}"


def prepared_data(
    *,
    source: DataSource,
    name: str,
    sequence: int,
    python: str,
    engine: Engine,
    workspace: Workspace,
    log: Path,
    say: Callable[[str], None],
) -> Path:
    """Return the folder of prepared shards, making it if it can be made without the network.

    Raises:
        MachineError: the data must be fetched first.
        RunError: the preparation failed.
    """
    folder = data_folder(data=workspace.data, source=source, name=name, sequence=sequence, python=python)
    if (folder / INDEX).is_file():
        return folder
    if source.kind != "standard-library":
        raise MachineError(
            "this data set is not on this machine",
            place=str(folder),
            found=name,
            hint=f"fetch it with `invoke data {name}`, or use --set data=standard-library",
        )
    say(f"preparing {name}, once: {folder}")
    prepare(
        ("--source", source.kind, "--sequence", str(sequence), "--out", engine.inside(folder)),
        engine=engine,
        log=log,
    )
    return folder


def prepare(arguments: tuple[str, ...], *, engine: Engine, log: Path) -> None:
    """Run twinrun.train.prepare in `engine`; raises RunError with the end of `log`."""
    program = (PYTHON, "-m", PREPARE, *arguments)
    command = Command(arguments=program, variables={}, writes_data=True)
    if run_to_end(engine, command, log=log):
        raise RunError(
            "the data could not be prepared",
            place=PREPARE,
            found=last_lines(log.read_text(encoding="utf-8", errors="replace")),
            hint=f"the whole log is {log}",
        )
