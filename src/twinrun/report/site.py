"""What the site and README.md say of all records: their figures, how right predictions were, and each number
of a publication as published, as measured here and as predicted."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from twinrun.foundation.files import write_atomically
from twinrun.foundation.text import markdown_table, number, percent, plural
from twinrun.manifests.claims import Claim, RecordClaim, ScoreDifferenceClaim
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.claims import predicted_claims, scores
from twinrun.report import words
from twinrun.report.charts import draw, sign_of
from twinrun.report.hardware import PRECISION, ModelChoices, choices
from twinrun.report.page import figure_text
from twinrun.report.picture import standalone
from twinrun.report.words import result, selected
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record
from twinrun.results.verdicts import FAILURES, HOLDS, Verdict
from twinrun.workloads.tables_and_charts import ABSENT, Mark, Row, RowChart, exact_mark

FILE = "README.md"
PICTURE = Path("docs", "assets", "headline.svg")
BLOCK = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)
HEADS = ("recipe", "measured", "what the newest record says", "record")
AnyClaim = Claim | RecordClaim | ScoreDifferenceClaim
# What is further than four times from published stands at the end of the axis.
TICKS = {0.25: "0.25x", 0.5: "0.5x", 1.0: "1x", 2.0: "2x", 4.0: "4x"}
# A table of more claims is folded.
SHOWN = 8
COLUMNS = ("what it says", "published", "measured here", "predicted", "verdict", "claim")
# How a publication names what it shows.
_FIGURE = re.compile(r"\b(?:Figures?|Tables?) \d+")


def with_figures(text: str, project: Project) -> str:
    """Return a page with a row between its markers for each record that stands for a recipe and hardware."""
    rows = []
    for name in project.recipes():
        for one in selected(_committed(name, project)):
            if one.plan.scale != "smoke":
                measured = ", ".join(result(one, project.metrics))
                rows.append((f"`{name}`", measured, words.headline(one), one.created[:10]))
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


class PublishedRow(NamedTuple):
    """One claim of a publication."""

    figure: str
    """Figure or table by the publication's own name, and the recipe."""
    claim: AnyClaim
    marks: tuple[Mark, ...]
    """What was measured and predicted, times as good as published."""
    judged: bool
    cells: tuple[str, ...]
    """Those of `COLUMNS`."""


def documents(project: Project) -> dict[str, str]:
    """Return by key of every recipe's own publication its title."""
    found = (one.recipe.publication for one in project.recipes().values())
    return {one.key: one.title for one in sorted(found, key=lambda one: one.key)}


def publication_rows(
    key: str, project: Project, verdicts: Mapping[str, Sequence[Verdict]]
) -> list[PublishedRow]:
    """Return a row for each claim whose source is the publication, or another document beside it.

    Args:
        verdicts: by name of a recipe those on the records that stand for it, and between them.
    """
    known, rows = documents(project), []
    for name, loaded in project.recipes().items():
        published, recipe = loaded.published, loaded.recipe
        claims: list[AnyClaim] = [*published.claim, *published.between_records, *published.score_difference]
        decided = [one for one in verdicts.get(name, ()) if one.final in (*HOLDS, *FAILURES)]
        for claim in claims:
            document = claim.source.document
            if document != key and not (recipe.publication.key == key and document not in known):
                continue
            named = _FIGURE.search(claim.source.where)
            figure = f"{named[0]}: {recipe.name}" if named else recipe.name
            if document != key:
                # The commit of a repository would lead out of the picture.
                figure += f", of {document.removeprefix('github:').partition('@')[0]}"
            own = [one for one in decided if one.claim == claim.id]
            rows.append(_row(figure, name, claim, own, predicted_of(name, claim.id, project)))
    figures = list(dict.fromkeys(row.figure for row in rows))
    return sorted(rows, key=lambda row: figures.index(row.figure))


def _row(
    figure: str,
    recipe: str,
    claim: AnyClaim,
    verdicts: Sequence[Verdict],
    predicted: tuple[float, float, float] | None,
) -> PublishedRow:
    lower = getattr(claim, "better", "higher") == "lower"
    times = (_times(one, lower=lower) for one in verdicts)
    marks = [exact_mark("measured", one) for one in times if one]
    shown = ABSENT
    if predicted:
        value, *ends = map(number, predicted)
        shown = f"{sign_of('predicted')} {value} ({' to '.join(ends)})"
        if claim.value:
            over, *both = (claim.value / one if lower else one / claim.value for one in predicted)
            marks.append(Mark(kind="predicted", value=over, low=min(both), high=max(both)))
    measured = dict.fromkeys(map(words.measured_value, verdicts))
    here = [f"{sign_of('measured')} {one}" for one in measured if one not in (ABSENT, "equal")]
    unit, per = getattr(claim, "unit", "ratio"), getattr(claim, "per", "run")
    cells = (
        claim.statement,
        f"{sign_of('published')} {words.quantity(claim.value, unit, per)}" if claim.value else "equal",
        ", ".join(here) or ABSENT,
        shown,
        ", ".join(dict.fromkeys(map(words.outcome, verdicts))) or "not judged",
        f"`{recipe}`: `{claim.id}`",
    )
    return PublishedRow(figure, claim, tuple(marks), bool(verdicts), cells)


def _times(verdict: Verdict, *, lower: bool) -> float | None:
    """Return how many times as good as published a measured value is; None where there is no multiple."""
    said = verdict.neutral or verdict
    if not said.measured or not said.published or said.measured < 0:
        return None
    # A share of what the device can do is better when it is higher, whatever it restates.
    lower = lower and (said is verdict or said.unit not in ("ratio", "%"))
    return said.published / said.measured if lower else said.measured / said.published


def predicted_of(recipe: str, claim: str, project: Project) -> tuple[float, float, float] | None:
    """Return what is predicted of a claim in its own unit, with its interval; None where nothing is."""
    known = (one for one in predicted_claims() if (one.recipe, one.claim) == (recipe, claim))
    return next((one.interval(project.gpus) for one in known), None)


def picture_of(key: str, title: str, rows: Sequence[PublishedRow]) -> RowChart:
    """Return a row for each figure, with a mark for each number that was measured or predicted."""
    drawn = []
    for figure, some in groupby(rows, lambda row: row.figure):
        group = list(some)
        said = f"{sum(row.judged for row in group)} of {plural(len(group), 'claim')} judged"
        marks = (exact_mark("published", 1), *(one for row in group for one in row.marks))
        drawn.append(Row(label=figure, marks=marks, said=said))
    return RowChart(
        name=f"publication-{key}",
        title=f"{title}: measured here and predicted beside published",
        x_label="times as good as published: better is to the right",
        rows=tuple(drawn),
        ticks=TICKS,
        notes=("Away from the published hardware a mark shows the claim's restatement.",),
    )


def publication_page(key: str, title: str, rows: Sequence[PublishedRow]) -> str:
    """Return the picture of a publication and a table for each of its figures, in Markdown."""
    parts = [f'<div class="excerpt">\n{figure_text(draw(picture_of(key, title, rows)))}\n</div>']
    for figure, some in groupby(rows, lambda row: row.figure):
        cells = [row.cells for row in some]
        table = markdown_table(COLUMNS, cells)
        if len(cells) > SHOWN:
            summary = f"<summary>{plural(len(cells), 'claim')}</summary>"
            table = f'<details markdown="1">{summary}\n\n{table}\n\n</details>'
        parts += [f"### {figure}", table]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main(Path.cwd())
