"""Records on their way from one user to the project: the form with its file, and what takes it in."""

from __future__ import annotations

import platform
from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import write_atomically
from twinrun.planning.project import Project
from twinrun.report.form import form
from twinrun.report.words import headline
from twinrun.results.reading import read_record
from twinrun.results.record import Record
from twinrun.results.submission import FILE, add_submission, write_submission


def offer(project: Project, record: Record, folder: Path) -> str:
    """Keep a form, and the file that goes with it, for hardware that the recipe has no record of.

    Returns:
        The form, why there is none, or nothing for hardware that is known.
    """
    known = project.results(project.recipe(record.plan.recipe))
    text = form(record, [read_record(file, project) for file in known])
    if text is None:
        return ""
    try:
        _write(project, folder, record, folder / FILE)
    except InputError as reason:
        return f"The results have no such GPU yet, and cannot take this run: {reason.message}\n"
    write_atomically(folder / "form.md", text)
    return text


def send(root: Path, what: Path, *, out: Path | None) -> Path:
    """Write the submission of a run to its folder, of a single record to the working folder; return it."""
    project = Project(root)
    record, usual = read_record(what, project), (what if what.is_dir() else Path()) / FILE
    return _write(project, what, record, out or usual)


def add(root: Path, recipe: str, file: Path) -> list[str]:
    """Add a submission to the results of a recipe; return lines that say what it is."""
    path, record = add_submission(file, recipe, Project(root))
    return [f"added: {path}", f"{headline(record)} As sent in: who ran it, and on what, nobody here saw."]


def _write(project: Project, source: Path, record: Record, out: Path) -> Path:
    from twinrun.machine.doctor import diagnose

    ran_on = record.machine.host, record.machine.kernel
    here = ran_on == (platform.node(), platform.release())
    doctor = diagnose(project.root).model_dump(mode="json") if here else None
    write_submission(out, source, project, doctor=doctor)
    return out
