"""A publication in one picture: each of its numbers as published, as measured here and as predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinrun.manifests.claims import Claim, RecordClaim, ScoreDifferenceClaim
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.claims import predicted_claims
from twinrun.report.hardware import Mark
from twinrun.report.headline_picture import LETTER, MARGIN, WIDTH, drawn_svg
from twinrun.report.words import measured_value, outcome, quantity
from twinrun.results.between import judge_between
from twinrun.results.record import Record
from twinrun.results.verdicts import FAILURES, Verdict

# Pixels: of a claim with a number, of one that says things are equal, of a line, a name, and around them.
ROW, SHORT, LINE, GROUP, HEAD, FOOT = 38, 22, 15, 28, 34, 26
# Times as good as published at the ends of the axis; what is further stands at its end, with its number.
LEAST, MOST = 0.25, 4.0
TICKS = (0.25, 0.5, 1.0, 2.0, 4.0)
HELD = ("reproduced", "holds-here", *FAILURES)
AnyClaim = Claim | RecordClaim | ScoreDifferenceClaim


@dataclass(frozen=True)
class PublicationRow:
    """One claim of a publication."""

    group: str
    """Recipe, and the document where that is another one."""
    claim: str
    published: str
    """In words; `equal` where it says that two things are the same."""
    numbered: bool
    """Whether a multiple of the published value means anything."""
    measured: tuple[tuple[float | None, str], ...]
    """By judged record: times as good as published, and what it says in words."""
    predicted: tuple[float, float, float] | None
    """Times as good as published, and the ends of its interval."""

    def values(self) -> list[tuple[Mark, str]]:
        """Return what is written: as published, and the multiples of it that were measured and predicted."""
        found: list[tuple[Mark, str]] = [("published", self.published)]
        times = sorted(one for one, _ in self.measured if one is not None)
        if times:
            ends = dict.fromkeys(_multiple(one) for one in (times[0], times[-1]))
            found.append(("measured", " to ".join(ends)))
        elif self.measured:
            found.append(("measured", self.measured[-1][1]))
        if self.predicted:
            found.append(("predicted", _multiple(self.predicted[0])))
        return found


def documents(project: Project) -> dict[str, str]:
    """Return by key of every recipe's own publication its title."""
    found = (one.recipe.publication for one in project.recipes().values())
    return {one.key: one.title for one in sorted(found, key=lambda one: one.key)}


def publication_rows(
    key: str, project: Project, records: Mapping[str, Sequence[Record]]
) -> list[PublicationRow]:
    """Return a row for each claim whose source is the publication, or another document beside it.

    Args:
        records: by name of a recipe those that stand for it.
    """
    known = documents(project)
    rows = []
    for name, loaded in project.recipes().items():
        own = loaded.recipe.publication.key == key
        claims: list[AnyClaim] = [
            *loaded.published.claim,
            *loaded.published.between_records,
            *loaded.published.score_difference,
        ]
        chosen = [
            one for one in claims if one.source.document == key or (own and one.source.document not in known)
        ]
        if chosen:
            verdicts = _verdicts(project, records.get(name, ()))
            rows += [_row(name, one, verdicts.get(one.id, ()), project, key) for one in chosen]
    # Stable: within a group, rows stay in the published order.
    groups = list(dict.fromkeys(row.group for row in rows))
    return sorted(rows, key=lambda row: groups.index(row.group))


def _verdicts(project: Project, records: Sequence[Record]) -> dict[str, tuple[Verdict, ...]]:
    """Return the verdicts that were decided, by claim."""
    asked = [one for one in records if one.plan.scale != "smoke"]
    found = [verdict for record in asked for verdict in record.verdicts]
    found += judge_between(asked, project)
    decided = [one for one in found if one.final in HELD]
    return {one.claim: tuple(two for two in decided if two.claim == one.claim) for one in decided}


def _row(
    recipe: str, claim: AnyClaim, verdicts: Sequence[Verdict], project: Project, key: str
) -> PublicationRow:
    better = getattr(claim, "better", "higher")
    measured = tuple((_times(one, better), _measured(one)) for one in verdicts)
    unit, per = getattr(claim, "unit", "ratio"), getattr(claim, "per", "run")
    published = quantity(claim.value, unit, per) if claim.value else "equal"
    predicted = None
    for one in predicted_claims().claim:
        if (one.recipe, one.claim) == (recipe, claim.id) and not one.unknown(project.gpus, calibration()):
            middle, low, high = one.interval(project.gpus, calibration())
            predicted = (middle / claim.value, low / claim.value, high / claim.value)
    for kernel in predicted_claims().kernel:
        if (kernel.recipe, kernel.claim) == (recipe, claim.id):
            row = kernel.time()
            predicted = (claim.value / row.ms, claim.value / row.high, claim.value / row.low)
    document = claim.source.document
    # The commit of a repository would lead out of the picture.
    said = document.removeprefix("github:").partition("@")[0]
    group = recipe if document == key else f"{recipe}, of {said}"
    return PublicationRow(group, claim.id, published, bool(claim.value), measured, predicted)


def _measured(verdict: Verdict) -> str:
    """Return what a record says in words; what has no number, such as two equal curves, by its outcome."""
    found = measured_value(verdict)
    return outcome(verdict) if found in ("-", "equal") else found


def _times(verdict: Verdict, better: str) -> float | None:
    """Return how many times as good as published a measured value is; None where there is no multiple."""
    said = verdict.neutral
    published, measured = (said.published, said.measured) if said else (verdict.published, verdict.measured)
    if not measured or not published or measured < 0:
        return None
    # A share of what the device can do is better when it is higher, whatever it restates.
    lower = better == "lower" and (said is None or said.unit not in ("ratio", "%"))
    return published / measured if lower else measured / published


def draw_publication(title: str, rows: Sequence[PublicationRow]) -> str:
    """Return the picture as SVG that takes its colours from the page around it."""
    top, placed = HEAD, list[tuple[PublicationRow, bool, int, int]]()
    for place, row in enumerate(rows):
        first = place == 0 or row.group != rows[place - 1].group
        top += GROUP * first
        below = top + _extra(row)
        placed.append((row, first, top, below))
        top = below + (ROW if row.numbered else SHORT)
    return drawn_svg(
        "publication.svg.j2",
        height=top + FOOT,
        title=title,
        said="; ".join(map(_said, rows)),
        rows=placed,
        ticks=TICKS,
        x=_x,
        head=HEAD,
        group=GROUP,
        foot=FOOT,
    )


def _said(row: PublicationRow) -> str:
    values = [f"published {row.published}", *(f"measured {words}" for _, words in row.measured)]
    values += [f"predicted {row.predicted[0]:.2f} times that"] if row.predicted else []
    return f"{row.claim}: {', '.join(values)}"


def _x(times: float) -> float:
    share = math.log(min(max(times, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return round(MARGIN + share * (WIDTH - 2 * MARGIN), 1)


def _extra(row: PublicationRow) -> int:
    """Return the height of a line of its own for the values, where name and values do not fit into one."""
    letters = len(row.claim) + sum(len(words) + 4 for _, words in row.values())
    return LINE if LETTER * letters > WIDTH - 2 * MARGIN else 0


def _multiple(times: float) -> str:
    return f"{times:.2f}x" if times < 10 else f"{times:.0f}x"
