"""A finished run: the judged record with its recipe and folder, for pages, forms and exports."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.project import Project
from twinrun.results.reading import read_record
from twinrun.results.record import Record
from twinrun.workloads.workload import Overview, PictureContext, RecordView, Workload


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A record with its verdicts, and all that belongs to it; whoever has this reads and judges nothing."""

    record: Record
    recipe: LoadedRecipe
    workload: Workload
    project: Project
    folder: Path
    """Run folder; of a committed record, the folder of `runs/` for all that is written of it."""
    file: Path
    """File of the record."""

    @property
    def is_committed(self) -> bool:
        """Whether the record lies apart from the other files of its run."""
        return self.file.parent != self.folder

    @cached_property
    def view(self) -> RecordView:
        """The record as its workload shows it."""
        return self.record.shown()

    @cached_property
    def overview(self) -> Overview:
        """Charts and tables of the run beside what was published."""
        drawn = PictureContext(recipe=self.recipe, gpus=self.project.gpus)
        return self.workload.overview([self.view], drawn)


def read_run(path: Path, project: Project) -> FinishedRun:
    """Read a record file, or the record of a run folder, and judge it; raises InputError as `read_record`."""
    record = read_record(path, project)
    file = path / "record.json" if path.is_dir() else path
    own = (file.parent / "record.json").is_file()
    folder = file.parent if own else project.root / "runs" / record.plan.recipe / file.stem
    return run_of(record, project, folder=folder, file=file)


def run_of(record: Record, project: Project, *, folder: Path, file: Path | None = None) -> FinishedRun:
    """Return the run of a record that was judged.

    Args:
        file: file of the record; `record.json` in `folder` when left out.
    """
    return FinishedRun(
        record=record,
        recipe=project.recipe(record.plan.recipe),
        workload=record.workload,
        project=project,
        folder=folder,
        file=file or folder / "record.json",
    )
