"""Tables of measured figures from the committed records: some rows in README.md, all among the results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from twinrun.foundation.files import write_atomically
from twinrun.foundation.text import markdown_table
from twinrun.manifests.metrics import RATIO, Metric
from twinrun.planning.project import Project
from twinrun.report.charts import Row, RowChart, draw_rows
from twinrun.report.hardware import PRECISION, ModelChoices, choices
from twinrun.report.picture import standalone
from twinrun.report.summary import SubjectRecords, ranked, spread_over, standing_for
from twinrun.report.words import claims_in_words
from twinrun.results.judged import Judged, hardware
from twinrun.results.reading import read_record
from twinrun.workloads.workload import MeasuredPoint

FILE = "README.md"
PICTURE = Path("docs", "assets", "headline.svg")
COMMAND = "python -m twinrun.report.figures"
# Each line of the comment names a row: recipe | hardware | subject | point.
BLOCK = re.compile(r"(<!-- figures\n(.*?)\n-->\n).*?(<!-- end of figures -->)", re.DOTALL)


def with_figures(text: str, project: Project) -> str:
    """Return a page with the rows that its markers name as the records give them."""
    return BLOCK.sub(lambda found: f"{found[1]}{chosen(found[2].splitlines(), project)}{found[3]}", text)


def chosen(lines: Sequence[str], project: Project) -> str:
    """Return a row for each `recipe | hardware | subject | point`, in Markdown; raises ValueError.

    A subject that no record shows has a row that says so; a point that its record does not have is an error.
    """
    heads = ["recipe", "hardware", "subject", "point", "measured", "claims", "record"]
    return markdown_table(heads, [_chosen(*line.split(" | "), project=project) for line in lines]) + "\n"


def _chosen(recipe: str, machine: str, subject: str, point: str, *, project: Project) -> list[str]:
    names = [f"`{recipe}`", machine, subject, point]
    found = [one for one in _ranked(recipe, project) if (one.hardware, one.subject) == (machine, subject)]
    if not found or not found[0].shown:
        return [*names, f"no record: {found[0].lacking}" if found else "no record", "-", "-"]
    record = found[0].shown
    rows = {row[2]: row for row in _rows(record, _metrics([record], project))}
    if point not in rows:
        raise ValueError(f"{FILE}: {record.run} has no {point}; allowed: {sorted(rows)}")
    # None stands beside another point.
    about = [one for one in record.verdicts if point in one.judged_at]
    return [*names, rows[point][3], claims_in_words(about), rows[point][-1]]


def figures(recipe: str, project: Project) -> str:
    """Return a row for each point of the record of each hardware and subject, in Markdown.

    Claims stand in the first row of their record.
    """
    subjects = _ranked(recipe, project)
    metrics = _metrics([one.shown for one in subjects if one.shown], project)
    heads = ["hardware", "subject", "point", "measured", "claims", "record"]
    rows = [row for one in subjects for row in _of_subject(one, metrics)]
    return markdown_table(heads, rows) + "\n"


def _of_subject(one: SubjectRecords, metrics: Sequence[Metric]) -> list[list[str]]:
    if one.shown is None:
        return [[one.hardware, one.subject, "-", f"no record: {one.lacking}", "-", "-"]]
    return list(_rows(one.shown, metrics))


def _ranked(recipe: str, project: Project) -> list[SubjectRecords]:
    return ranked([read_record(file, project) for file in project.results(project.recipe(recipe))])


def main(root: Path) -> None:
    """Write the tables into README.md, and the picture that it opens with."""
    path, project = root / FILE, Project(root)
    write_atomically(path, with_figures(path.read_text(encoding="utf-8"), project))
    write_atomically(root / PICTURE, picture(project))


def picture(project: Project) -> str:
    """Return the picture of headline figures, over the records that stand for their subjects."""
    recipes = [name for name, loaded in project.recipes().items() if project.results(loaded)]
    standing = [one.shown for name in recipes for one in _ranked(f"recipes/{name}", project) if one.shown]
    return standalone(headline_picture(choices(project, standing)))


def headline_picture(found: Sequence[ModelChoices]) -> str:
    """Return the shares of the peak of models and GPUs that a claim is about or a record measured, as SVG."""
    rows = [
        Row(label=f"{one.name}, {choice.gpu.name.split(' ', 1)[-1]}", marks=marks)
        for one in found
        for choice in one.choices
        if choice.precision == PRECISION and any(rate.mark != "reference" for rate in choice.known)
        if (marks := choice.marks(100 * one.shape.flops_per_token() / choice.gpu.device_peak_flops))
    ]
    title = "Share of the dense 16-bit peak that training reached"
    label = "share of the dense 16-bit peak, %"
    return draw_rows(RowChart(name="headline", title=title, x_label=label, rows=tuple(rows))).svg


def _metrics(records: Sequence[Judged], project: Project) -> list[Metric]:
    """Return the metrics that stand for the records: the first, and those that points have once."""
    points = [point for record in records for point in record.points]
    names = dict.fromkeys(name for record in records for name in record.workload.headline)
    measured = [name for name in names if any(_of(point, name) for point in points)]
    shown = [
        name for name in measured if name == measured[0] or all(len(_of(one, name)) < 2 for one in points)
    ]
    return [project.metrics[name] for name in shown]


def _rows(record: Judged, metrics: Sequence[Metric]) -> Iterator[list[str]]:
    claims = claims_in_words(record.verdicts)
    for number, point in enumerate(record.points):
        found = [(metric, _of(point, metric.id)) for metric in metrics]
        texts = [f"{spread_over(some, metric)} {_title(metric)}" for metric, some in found if some]
        measured, day = ", ".join(texts), record.created[:10]
        said = "" if number else claims
        yield [hardware(record), record.description.subject, point.id, measured, said, day]


def _of(point: MeasuredPoint, metric: str) -> list[float]:
    return [one.median for one in standing_for(point, metric)]


def _title(metric: Metric) -> str:
    return metric.title if metric.unit in (RATIO, metric.title) else f"{metric.title}, {metric.unit}"


if __name__ == "__main__":
    main(Path.cwd())
