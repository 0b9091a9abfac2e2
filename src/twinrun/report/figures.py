"""Tables of measured figures from the committed records: some rows in README.md, all among the results."""

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
# Each line of the comment names a row: recipe | hardware | subject | point.
BLOCK = re.compile(r"(<!-- figures\n(.*?)\n-->\n).*?(<!-- end of figures -->)", re.DOTALL)


def with_figures(text: str, project: Project) -> str:
    """Return a page with the rows that its markers name as the records give them."""
    return BLOCK.sub(lambda found: f"{found[1]}{chosen(found[2].splitlines(), project)}{found[3]}", text)


def chosen(lines: Sequence[str], project: Project) -> str:
    """Return a row for each `recipe | hardware | subject | point`, in Markdown; raises ValueError."""
    recipes = {line.partition(" | ")[0] for line in lines}
    known = {f"{name} | {' | '.join(row[:3])}": row for name in recipes for row in _measured(name, project)}
    if unknown := [line for line in lines if line not in known]:
        raise ValueError(f"{FILE}: no committed record has {unknown}; allowed: {sorted(known)}")
    heads = ["recipe", "hardware", "subject", "point", "measured", "record"]
    return _table(heads, [[f"`{line.partition(' | ')[0]}`", *known[line]] for line in lines])


def figures(recipe: str, project: Project) -> str:
    """Return a row for each point of the newest record of each hardware and subject, in Markdown."""
    return _table(["hardware", "subject", "point", "measured", "record"], _measured(recipe, project))


def _measured(recipe: str, project: Project) -> list[list[str]]:
    files = project.results(project.recipe(recipe))
    records = newest_of_each([read_record(file, project) for file in files])
    metrics = [project.metrics[name] for name in _shown(records)]
    return [row for record in records for row in _rows(record, metrics)]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, ["---"] * len(heads), *rows))


def newest_of_each(records: Iterable[Record]) -> list[Record]:
    """Return the newest record of each hardware and subject, in the order of their names."""
    oldest_first = sorted(records, key=lambda record: record.created)
    newest = {(hardware(one), one.description.subject): one for one in oldest_first}
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
    subject = record.description.subject
    for point in record.points:
        found = [(metric, _of(point, metric.id)) for metric in metrics]
        texts = [f"{spread_over(some, metric)} {_title(metric)}" for metric, some in found if some]
        yield [hardware(record), subject, point.id, ", ".join(texts), record.created[:10]]


def _of(point: PointRecord, metric: str) -> list[float]:
    return [one.median for one in point.measurements if one.metric == metric]


def _title(metric: Metric) -> str:
    return metric.title if metric.unit in (RATIO, metric.title) else f"{metric.title}, {metric.unit}"


if __name__ == "__main__":
    main(Path.cwd())
