"""A judged record and the folder of its run, for what is written beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twinrun.planning.project import Project
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A judged record, and where what is written of it goes."""

    record: Judged
    folder: Path
    """Run folder; of a committed record, the folder of `runs/` for all that is written of it."""
    file: Path
    """File of the record."""

    @property
    def is_committed(self) -> bool:
        """Whether the record lies apart from the other files of its run."""
        return self.file.parent != self.folder


def read_run(path: Path, project: Project) -> FinishedRun:
    """Read a record file, or the record of a run folder, and judge it; raises InputError as `read_record`."""
    record = read_record(path, project)
    file = path / "record.json" if path.is_dir() else path
    own = (file.parent / "record.json").is_file()
    folder = file.parent if own else project.root / "runs" / record.plan.recipe / file.stem
    return FinishedRun(record=record, folder=folder, file=file)
