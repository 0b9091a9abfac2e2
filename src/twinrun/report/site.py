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
from twinrun.report.picture import COLOURS, canvas, label_logarithmic, standalone, svg_text
from twinrun.report.summary import result, selected
from twinrun.report.words import headline
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record

FILE = "README.md"
PICTURE = Path("docs", "assets", "headline.svg")
BLOCK = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)
HEADS = ("recipe", "measured", "what the newest record says", "record")
# Inches of the height of a panel of predictions.
PANEL = 2.1
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


def write_picture(path: Path, gpus: Mapping[str, Gpu]) -> None:
    """Draw predicted over published times, a panel for each GPU, one below the other for narrow screens."""
    held_out, fitted = (residuals(gpus, calibration(), part=part) for part in ("test", "fit"))
    names = sorted({one.row.gpu for one in (*held_out, *fitted)})
    with canvas(height=PANEL * len(names), panels=len(names)) as (figure, panels):
        for axes, name in zip(panels, names, strict=True):
            for found, colour, label in ((fitted, "reference", "fitted"), (held_out, "measured", "held out")):
                mine = [one for one in found if one.row.gpu == name]
                ratios = [1 + one.error for one in mine]
                # Of what is predicted, the published time lies between these shares nine times of ten.
                below = [
                    ratio * (1 - math.exp(-one.prediction.half))
                    for ratio, one in zip(ratios, mine, strict=True)
                ]
                above = [
                    ratio * (math.exp(one.prediction.half) - 1)
                    for ratio, one in zip(ratios, mine, strict=True)
                ]
                axes.errorbar(
                    [one.row.seconds for one in mine],
                    ratios,
                    yerr=None if found is fitted else [below, above],
                    fmt="o",
                    markersize=3,
                    linewidth=0.5,
                    alpha=0.6,
                    color=COLOURS[colour],
                    label=f"{label}, {len(mine)}",
                )
            axes.axhline(1, color=COLOURS["ink"], linewidth=1)
            axes.set(xscale="log", ylim=(0.5, 1.6), title=gpus[name].name)
            axes.legend(fontsize=9, frameon=False, loc="upper right")
        label_logarithmic(panels[-1].xaxis)
        figure.supxlabel("published time of a step, s")
        figure.supylabel("predicted over published")
        said = f"A panel for each of {', '.join(gpus[name].name for name in names)}."
        svg = svg_text(figure, name="predictions", title="Predicted over published", description=said)
    write_atomically(path, standalone(svg))


if __name__ == "__main__":
    main(Path.cwd())
