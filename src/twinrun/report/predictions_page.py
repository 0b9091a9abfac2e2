"""Predicted beside published, for every row that was held out: tables and a picture."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, quantiles

from matplotlib.axes import Axes

from twinrun.foundation.files import write_atomically
from twinrun.foundation.text import markdown_table, percent
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.claims import PredictedClaim, PredictedKernel, predicted_claims
from twinrun.predict.rows import Residual, residuals
from twinrun.report.picture import COLOURS, canvas, label_logarithmic, standalone, svg_text
from twinrun.report.publication import predicted_of
from twinrun.results.judged import Judged, hardware

WORST = 10
# Inches of the height of a panel.
PANEL = 2.1
SIZES = ((1e9, "up to 1B"), (1e10, "1B to 10B"), (1e11, "10B to 100B"))


def predictions(project: Project, records: Sequence[Judged]) -> str:
    """Return the tables of the page, as Markdown.

    Args:
        records: all that are committed, of which those count whose plan predicted something.
    """
    found = residuals(project.gpus, calibration())
    return "\n\n".join(
        (
            "## Errors of rows that were held out",
            _folded("Errors by software and GPU, cut, size and nodes", _slices(found, project.gpus)),
            f"## The {WORST} worst rows",
            _folded("What they were, and what was predicted", _worst(found, project.gpus)),
            "## Published claims that few can run again",
            _folded("What was published, and what is predicted", _claims(project)),
            "## Runs that were predicted before they ran",
            _runs(records),
        )
    )


def _folded(title: str, table: str) -> str:
    return f'<details markdown="1"><summary>{title}</summary>\n\n{table}\n\n</details>'


def _slices(found: Sequence[Residual], gpus: Mapping[str, Gpu]) -> str:
    """Return errors and coverage by software and GPU, by how the model was cut, and by size."""
    groups: defaultdict[tuple[str, str], list[Residual]] = defaultdict(list)
    for one in found:
        row = one.row
        groups[one.prediction.software.title, gpus[row.gpu].name].append(one)
        cut = f"tensor {row.tensor}" if row.tensor > 1 else "whole matrices"
        groups["cut", f"{cut}, {row.pipeline} stages" if row.pipeline > 1 else cut].append(one)
        groups["size", f"{_size(one)} parameters"].append(one)
        groups["nodes", "one" if row.nodes == 1 else "several"].append(one)
    rows = [
        (*key, str(len(group)), *map(percent, (mean(errors), _high(errors), mean(covered))))
        for key, group in sorted(groups.items())
        if (errors := [abs(one.error) for one in group]) and (covered := [one.covered for one in group])
    ]
    columns = ("slice", "of it", "rows", "mean error", "95th percentile", "inside the interval")
    return markdown_table(columns, rows)


def _worst(found: Sequence[Residual], gpus: Mapping[str, Gpu]) -> str:
    worst = sorted(found, key=lambda one: -abs(math.log1p(one.error)))[:WORST]
    rows = [
        (
            one.row.source,
            f"{gpus[one.row.gpu].name}, {one.row.nodes} x {one.row.devices_per_node}",
            f"{one.row.model or one.row.shape.family} of {_billions(one)}, sequence {one.row.sequence}",
            f"microbatch {one.row.microbatch}, tensor {one.row.tensor}, pipeline {one.row.pipeline}",
            f"{one.row.seconds:.4g} s",
            f"{one.row.seconds * (1 + one.error):.4g} s",
            f"{one.error:+.1%}, {'inside' if one.covered else 'outside'}",
        )
        for one in worst
    ]
    return markdown_table(("rows of", "machines", "model", "layout", "published", "predicted", "error"), rows)


def _runs(records: Sequence[Judged]) -> str:
    """Return predicted beside measured of every record that carries a prediction."""
    rows = []
    for record in records:
        points = {point.id: point for point in record.points}
        for name, one in record.view.predicted.items():
            measured = points[name].measurement("step-time")
            if one.seconds is None or one.covers is None or measured is None:
                continue
            low, high = one.covers
            rows.append(
                (
                    f"`{record.plan.recipe}`, {name}",
                    hardware(record),
                    f"{one.seconds:.4g} s ({low:.4g} to {high:.4g})",
                    f"{measured.median:.4g} s",
                    f"{one.seconds / measured.median - 1:+.1%}",
                    f"{one.software}, {one.calibration}",
                )
            )
    if not rows:
        return "Plans keep their predictions since November 2026; no committed record is that young."
    return markdown_table(("run", "hardware", "predicted", "measured", "error", "calibration"), rows)


def _claims(project: Project) -> str:
    rows = []
    every: tuple[PredictedClaim | PredictedKernel, ...] = predicted_claims().claim
    for one in every + predicted_claims().kernel:
        claim = project.recipe(one.recipe).published.restated[one.claim]
        rows.append(
            (
                f"`{one.recipe}`",
                claim.statement,
                _rounded(claim.value),
                *_predicted(one, project),
                one.unit,
            )
        )
    return markdown_table(("recipe", "claim", "published", "predicted", "interval", "unit"), rows)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _predicted(one: PredictedClaim | PredictedKernel, project: Project) -> tuple[str, str]:
    """Return value and interval, or that the model cannot say and why."""
    if found := predicted_of(one.recipe, one.claim, project):
        value, low, high = found
        bound = f", our kernel; bound by {one.time().bound}" if isinstance(one, PredictedKernel) else ""
        return _rounded(value), f"{low:.3g} to {high:.3g}{bound}"
    return "cannot say", (isinstance(one, PredictedClaim) and one.unknown(project.gpus, calibration())) or ""


def write_picture(path: Path, gpus: Mapping[str, Gpu]) -> None:
    """Draw predicted over published times, a panel for each GPU, one below the other for narrow screens."""
    held_out, fitted = (residuals(gpus, calibration(), part=part) for part in ("test", "fit"))
    names = sorted({one.row.gpu for one in (*held_out, *fitted)})
    with canvas(height=PANEL * len(names), panels=len(names)) as (figure, panels):
        for axes, name in zip(panels, names, strict=True):
            _draw(axes, fitted, name, colour="reference", label="fitted", with_reach=False)
            _draw(axes, held_out, name, colour="measured", label="held out", with_reach=True)
            axes.axhline(1, color=COLOURS["ink"], linewidth=1)
            axes.set(xscale="log", ylim=(0.5, 1.6), title=gpus[name].name)
            axes.legend(fontsize=9, frameon=False, loc="upper right")
        label_logarithmic(panels[-1].xaxis)
        figure.supxlabel("published time of a step, s")
        figure.supylabel("predicted over published")
        said = f"A panel for each of {', '.join(gpus[name].name for name in names)}."
        svg = svg_text(figure, name="predictions", title="Predicted over published", description=said)
    write_atomically(path, standalone(svg))


def _draw(
    axes: Axes, group: Sequence[Residual], gpu: str, *, colour: str, label: str, with_reach: bool
) -> None:
    mine = [one for one in group if one.row.gpu == gpu]
    ratios = [1 + one.error for one in mine]
    halves = [one.prediction.half for one in mine]
    # Of what is predicted, the published time lies between these shares nine times of ten.
    below = [ratio * (1 - math.exp(-half)) for ratio, half in zip(ratios, halves, strict=True)]
    above = [ratio * (math.exp(half) - 1) for ratio, half in zip(ratios, halves, strict=True)]
    axes.errorbar(
        [one.row.seconds for one in mine],
        ratios,
        yerr=[below, above] if with_reach else None,
        fmt="o",
        markersize=3,
        linewidth=0.5,
        alpha=0.6,
        color=COLOURS[colour],
        label=f"{label}, {len(mine)}",
    )


def _billions(one: Residual) -> str:
    # Models of one size have other rows of positions at other sequences.
    count = one.row.shape.model_copy(update={"sequence": 2048}).parameters()
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def _size(one: Residual) -> str:
    count = one.row.shape.parameters()
    return next((f"{name}" for most, name in SIZES if count <= most), "more than 100B")


def _high(errors: list[float]) -> float:
    return quantiles(errors, n=20)[-1] if len(errors) > 1 else errors[0]
