"""What the site and README.md say of all records: rows of figures, a picture, how right predictions were."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, quantiles

from twinrun.foundation.files import write_atomically
from twinrun.foundation.text import markdown_table, percent
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.rows import Residual, residuals
from twinrun.report.charts import Row, RowChart, draw_rows
from twinrun.report.hardware import PRECISION, ModelChoices, choices
from twinrun.report.picture import standalone
from twinrun.report.summary import result, selected
from twinrun.report.words import headline
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record

FILE = "README.md"
PICTURE = Path("docs", "assets", "headline.svg")
BLOCK = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)
HEADS = ("recipe", "measured", "what the newest record says", "record")
SIZES = ((1e9, "up to 1B"), (1e10, "1B to 10B"), (1e11, "10B to 100B"), (math.inf, "more than 100B"))


def with_figures(text: str, project: Project) -> str:
    """Return a page with a row between its markers for each record that stands for a recipe and hardware."""
    rows = []
    for name in project.recipes():
        for one in selected(_committed(name, project)):
            if one.plan.scale != "smoke":
                measured = ", ".join(result(one, project.metrics))
                rows.append((f"`{name}`", measured, headline(one), one.created[:10]))
    table = markdown_table(HEADS, rows) if rows else "No record of a run on GPUs is committed yet."
    return BLOCK.sub(lambda marks: f"{marks[1]}{table}\n{marks[2]}", text)


def _committed(recipe: str, project: Project) -> list[Judged]:
    return [read_record(file, project) for file in project.results(project.recipe(recipe))]


def main(root: Path) -> None:
    """Write the tables into README.md, and the picture that it opens with."""
    path, project = root / FILE, Project(root)
    write_atomically(path, with_figures(path.read_text(encoding="utf-8"), project))
    standing = [one for name in project.recipes() for one in selected(_committed(name, project))]
    write_atomically(root / PICTURE, standalone(headline_picture(choices(project, standing))))


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


def predictions(project: Project) -> str:
    """Return the errors of rows that were held out, as Markdown."""
    found = residuals(project.gpus, calibration())
    return f"## Errors of rows that were held out\n\n{_slices(found, project.gpus)}"


def _slices(found: Sequence[Residual], gpus: Mapping[str, Gpu]) -> str:
    """Return errors and coverage by software and GPU, by how the model was cut, and by size."""
    groups: defaultdict[tuple[str, str], list[Residual]] = defaultdict(list)
    for one in found:
        row, count = one.row, one.row.shape.parameters()
        cut = f"tensor {row.tensor}" if row.tensor > 1 else "whole matrices"
        size = next(name for most, name in SIZES if count <= most)
        groups[one.prediction.software.title, gpus[row.gpu].name].append(one)
        groups["cut", f"{cut}, {row.pipeline} stages" if row.pipeline > 1 else cut].append(one)
        groups["size", f"{size} parameters"].append(one)
        groups["nodes", "one" if row.nodes == 1 else "several"].append(one)
    rows = []
    for key, group in sorted(groups.items()):
        errors = [abs(one.error) for one in group]
        high = quantiles(errors, n=20)[-1] if len(errors) > 1 else errors[0]
        inside = mean(one.covered for one in group)
        rows.append((*key, str(len(group)), *map(percent, (mean(errors), high, inside))))
    columns = ("slice", "of it", "rows", "mean error", "95th percentile", "inside the interval")
    return markdown_table(columns, rows)


if __name__ == "__main__":
    main(Path.cwd())
