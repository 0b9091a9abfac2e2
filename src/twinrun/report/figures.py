"""The tables of measured figures in README.md, written from the committed records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from twinrun.foundation.files import write_atomically
from twinrun.manifests.metrics import RATIO, Metric
from twinrun.planning.project import Project
from twinrun.report.summary import spread_over
from twinrun.results.reading import read_record
from twinrun.results.record import Record, hardware
from twinrun.workloads.workload import PointRecord

FILE = "README.md"
COMMAND = "python -m twinrun.report.figures"
BLOCK = re.compile(r"(<!-- figures: ([a-z0-9-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def with_figures(text: str, project: Project) -> str:
    """Return a page with the tables between its markers as the records give them."""
    return BLOCK.sub(lambda found: f"{found[1]}{figures(found[2], project)}{found[3]}", text)


def figures(recipe: str, project: Project) -> str:
    """Return a row for each point of the newest record of each hardware and subject, in Markdown."""
    files = project.results(project.recipe(recipe))
    records = newest_of_each([read_record(file, project) for file in files])
    metrics = [project.metrics[name] for name in _shown(records)]
    heads = ["hardware", "subject", "point", *(_title(metric) for metric in metrics), "record"]
    rows = [row for record in records for row in _rows(record, metrics)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, ["---"] * len(heads), *rows))


def newest_of_each(records: Iterable[Record]) -> list[Record]:
    """Return the newest record of each hardware and subject, in the order of their names."""
    oldest_first = sorted(records, key=lambda record: record.created)
    newest = {(hardware(one), one.workload.subject(one.plan.part)): one for one in oldest_first}
    return [record for _, record in sorted(newest.items(), key=lambda item: item[0])]


def main(root: Path) -> None:
    """Write the tables into README.md."""
    path = root / FILE
    write_atomically(path, with_figures(path.read_text(encoding="utf-8"), Project(root)))


def _shown(records: Sequence[Record]) -> list[str]:
    """Return the metrics that stand for the records: the first, and those that points have once."""
    points = [point for record in records for point in record.points]
    names = dict.fromkeys(name for record in records for name in record.workload.headline)
    measured = [name for name in names if any(_of(point, name) for point in points)]
    return [
        name for name in measured if name == measured[0] or all(len(_of(one, name)) < 2 for one in points)
    ]


def _rows(record: Record, metrics: Sequence[Metric]) -> Iterator[list[str]]:
    subject = record.workload.subject(record.plan.part)
    for point in record.points:
        cells = [spread_over(_of(point, metric.id), metric) for metric in metrics]
        yield [hardware(record), subject, point.id, *cells, record.created[:10]]


def _of(point: PointRecord, metric: str) -> list[float]:
    return [one.median for one in point.measurements if one.metric == metric]


def _title(metric: Metric) -> str:
    return metric.title if metric.unit in (RATIO, metric.title) else f"{metric.title}, {metric.unit}"


if __name__ == "__main__":
    main(Path.cwd())
