"""What the site and README.md say of all records: rows of figures, a picture, how right predictions were."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from twinrun.foundation.files import write_atomically
from twinrun.foundation.text import markdown_table, percent
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.rows import scores
from twinrun.report.charts import draw
from twinrun.report.hardware import PRECISION, ModelChoices, choices
from twinrun.report.picture import standalone
from twinrun.report.summary import result, selected
from twinrun.report.words import headline
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record
from twinrun.workloads.tables_and_charts import Row, RowChart

FILE = "README.md"
PICTURE = Path("docs", "assets", "headline.svg")
BLOCK = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)
HEADS = ("recipe", "measured", "what the newest record says", "record")


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
    return draw(RowChart(name="headline", title=title, x_label=label, rows=tuple(rows))).svg


def predictions() -> str:
    """Return how far predictions of each source were off while none of its rows was known, as Markdown."""
    heads = ("source left out whole", "rows", "runs of it known", "mean error", "bias", "inside", "interval")
    lines = [
        (
            one.source,
            str(one.rows),
            str(one.runs),
            percent(one.error),
            f"{one.bias:+.1%}",
            percent(one.inside),
            f"a factor of {math.exp(one.half):.2f}",
        )
        for one in scores()
    ]
    sources = "\n".join(f"- {name}: {text}" for name, text in calibration().source.items())
    return f"{markdown_table(heads, lines)}\n\n## Sources\n\n{sources}"


if __name__ == "__main__":
    main(Path.cwd())
