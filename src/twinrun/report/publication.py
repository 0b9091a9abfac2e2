"""A publication: each of its numbers as published, as measured here and as predicted, figure by figure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from twinrun.foundation.text import markdown_table, number, plural
from twinrun.manifests.claims import Claim, RecordClaim, ScoreDifferenceClaim
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.claims import PredictedClaim, PredictedKernel, predicted_claims
from twinrun.report import words
from twinrun.report.charts import Row, RowChart, draw_rows, sign_of
from twinrun.report.page import page_environment
from twinrun.results.verdicts import FAILURES, Verdict
from twinrun.workloads.tables_and_charts import ABSENT, Bar, BarKind

AnyClaim = Claim | RecordClaim | ScoreDifferenceClaim
# A table of more claims is folded.
SHOWN = 8
# What is further than four times from published stands at the end of the axis.
TICKS = {0.25: "0.25x", 0.5: "0.5x", 1.0: "1x", 2.0: "2x", 4.0: "4x"}
HELD = ("reproduced", "exceeds", "holds-here", *FAILURES)
# How a publication names what it shows.
_FIGURE = re.compile(r"\b(?:Figures?|Tables?) \d+")


@dataclass(frozen=True)
class PublishedRow:
    """One claim of a publication."""

    figure: str
    """Figure or table by the publication's own name, and the recipe."""
    claim: AnyClaim
    recipe: str
    verdicts: tuple[Verdict, ...]
    """Those that were decided."""
    predicted: tuple[float, float, float] | None
    """Value in the claim's unit, and the ends of its interval."""

    @property
    def lower(self) -> bool:
        """Whether less is better."""
        return getattr(self.claim, "better", "higher") == "lower"

    def marks(self) -> tuple[Bar, ...]:
        """Return what was measured and predicted, times as good as published."""
        times = [one for one in map(self._times, self.verdicts) if one]
        found = [_bar("measured", one, one, one) for one in times]
        if self.predicted and self.claim.value:
            over = (one / self.claim.value for one in self.predicted)
            found.append(_bar("predicted", *(1 / one if self.lower else one for one in over)))
        return tuple(found)

    def _times(self, verdict: Verdict) -> float | None:
        """Return how many times as good as published a measured value is; None where there is no multiple."""
        said = verdict.neutral or verdict
        if not said.measured or not said.published or said.measured < 0:
            return None
        # A share of what the device can do is better when it is higher, whatever it restates.
        lower = self.lower and (said is verdict or said.unit not in ("ratio", "%"))
        return said.published / said.measured if lower else said.measured / said.published

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table: the claim, as published, as found here, as predicted, and verdicts."""
        claim, found = (
            self.claim,
            [one for one in self.verdicts if words.measured_value(one) not in ("-", "equal")],
        )
        unit, per = getattr(claim, "unit", "ratio"), getattr(claim, "per", "run")
        here = dict.fromkeys(f"{sign_of('measured')} {words.measured_value(one)}" for one in found)
        predicted = ABSENT
        if self.predicted:
            value, low, high = self.predicted
            predicted = f"{sign_of('predicted')} {number(value)} ({number(low)} to {number(high)})"
        return (
            claim.statement,
            f"{sign_of('published')} {words.quantity(claim.value, unit, per)}" if claim.value else "equal",
            ", ".join(here) or ABSENT,
            predicted,
            ", ".join(dict.fromkeys(map(words.outcome, self.verdicts))) or "not judged",
            f"`{self.recipe}`: `{claim.id}`",
        )


def _bar(kind: BarKind, value: float, *ends: float) -> Bar:
    return Bar(kind=kind, value=value, low=min(ends), high=max(ends), label="", detail="")


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
    rows = list(_rows(key, project, verdicts))
    figures = list(dict.fromkeys(row.figure for row in rows))
    return sorted(rows, key=lambda row: figures.index(row.figure))


def _rows(key: str, project: Project, verdicts: Mapping[str, Sequence[Verdict]]) -> Iterator[PublishedRow]:
    known = documents(project)
    for name, loaded in project.recipes().items():
        published, recipe = loaded.published, loaded.recipe
        claims: list[AnyClaim] = [*published.claim, *published.between_records, *published.score_difference]
        decided = [one for one in verdicts.get(name, ()) if one.final in HELD]
        for claim in claims:
            document = claim.source.document
            if document != key and not (recipe.publication.key == key and document not in known):
                continue
            found = _FIGURE.search(claim.source.where)
            figure = f"{found[0]}: {recipe.name}" if found else recipe.name
            if document != key:
                # The commit of a repository would lead out of the picture.
                figure += f", of {document.removeprefix('github:').partition('@')[0]}"
            own = tuple(one for one in decided if one.claim == claim.id)
            yield PublishedRow(figure, claim, name, own, predicted_of(name, claim.id, project))


def predicted_of(recipe: str, claim: str, project: Project) -> tuple[float, float, float] | None:
    """Return what is predicted of a claim in its own unit, with its interval; None where nothing is."""
    every: tuple[PredictedClaim | PredictedKernel, ...] = predicted_claims().claim
    for one in every + predicted_claims().kernel:
        if (one.recipe, one.claim) != (recipe, claim):
            continue
        if isinstance(one, PredictedKernel):
            row = one.time()
            return row.ms, row.low, row.high
        if not one.unknown(project.gpus, calibration()):
            return one.interval(project.gpus, calibration())
    return None


def picture_of(key: str, title: str, rows: Sequence[PublishedRow]) -> RowChart:
    """Return a row for each figure, with a mark for each number that was measured or predicted."""
    drawn = []
    for figure, some in groupby(rows, lambda row: row.figure):
        group = list(some)
        judged = sum(bool(row.verdicts) for row in group)
        said = f"{judged} of {plural(len(group), 'claim')} judged"
        drawn.append(
            Row(
                label=figure,
                marks=(_bar("published", 1, 1), *(two for row in group for two in row.marks())),
                said=said,
            )
        )
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
    template = page_environment().from_string(
        '{% import "parts.html.j2" as parts %}{{ parts.figure(picture) }}'
    )
    figure = template.render(picture=draw_rows(picture_of(key, title, rows)))
    columns = ("what it says", "published", "measured here", "predicted", "verdict", "claim")
    # Markdown ends a block of HTML at an empty line.
    drawn = "\n".join(line for line in figure.splitlines() if line.strip())
    parts = [f'<div class="excerpt">\n{drawn}\n</div>']
    for figure, some in groupby(rows, lambda row: row.figure):
        cells = [row.cells() for row in some]
        table = markdown_table(columns, cells)
        if len(cells) > SHOWN:
            summary = f"<summary>{plural(len(cells), 'claim')}</summary>"
            table = f'<details markdown="1">{summary}\n\n{table}\n\n</details>'
        parts += [f"### {figure}", table]
    return "\n\n".join(parts)
