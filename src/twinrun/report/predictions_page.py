"""Predicted beside published, for every row that nothing was fitted on: tables and a picture."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, quantiles

from matplotlib.figure import Figure

from twinrun.foundation.text import markdown_table, percent
from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.claims import PredictedClaim, predicted_claims
from twinrun.predict.rows import Residual, residuals
from twinrun.results.record import Record, hardware

WORST = 10


def predictions(project: Project, records: Sequence[Record]) -> str:
    """Return the tables of the page, as Markdown.

    Args:
        records: all that are committed, of which those count whose plan predicted something.
    """
    found = residuals(project.gpus, calibration())
    return "\n\n".join(
        (
            "## Errors by software, GPU and size",
            _by_kind(found, project.gpus),
            f"## The {WORST} worst rows",
            _worst(found, project.gpus),
            "## Published claims that few can run again",
            _claims(project),
            "## Runs that were predicted before they ran",
            _runs(records),
        )
    )


def _by_kind(found: Sequence[Residual], gpus: Mapping[str, Gpu]) -> str:
    groups: defaultdict[tuple[str, str, str], list[Residual]] = defaultdict(list)
    for one in found:
        for size in ("all", f"{_billions(one)} parameters"):
            groups[one.prediction.software.title, gpus[one.row.gpu].name, size].append(one)
    rows = [
        (*key, str(len(group)), percent(mean(errors)), percent(_high(errors)), percent(_covered(group)))
        for key, group in sorted(groups.items())
        if (errors := [abs(one.error) for one in group])
    ]
    columns = ("software", "GPU", "size", "rows", "mean error", "95th percentile", "inside the interval")
    return markdown_table(columns, rows)


def _worst(found: Sequence[Residual], gpus: Mapping[str, Gpu]) -> str:
    worst = sorted(found, key=lambda one: -abs(math.log1p(one.error)))[:WORST]
    rows = [
        (
            gpus[one.row.gpu].name,
            f"{one.row.nodes} x {one.row.devices_per_node}",
            f"{_billions(one)}, sequence {one.row.sequence}",
            f"microbatch {one.row.microbatch}, tensor {one.row.tensor}, pipeline {one.row.pipeline}",
            f"{one.row.seconds:.4g} s",
            f"{one.row.seconds * (1 + one.error):.4g} s",
            f"{one.error:+.1%}",
        )
        for one in worst
    ]
    return markdown_table(
        ("GPU", "nodes x devices", "model", "layout", "published", "predicted", "error"), rows
    )


def _runs(records: Sequence[Record]) -> str:
    """Return predicted beside measured of every record that carries a prediction."""
    rows = []
    for record in records:
        points = {point.id: point for point in record.points}
        for name, one in record.shown().predicted.items():
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
    for one in predicted_claims():
        published = project.recipe(one.recipe).published
        claims: dict[str, Claim | RecordClaim] = {claim.id: claim for claim in published.claim}
        claims |= {claim.id: claim for claim in published.between_records}
        rows.append(
            (
                f"`{one.recipe}`",
                claims[one.claim].statement,
                _rounded(claims[one.claim].value),
                *_predicted(one, project.gpus),
                one.unit,
            )
        )
    return markdown_table(("recipe", "claim", "published", "predicted", "interval", "unit"), rows)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _predicted(one: PredictedClaim, gpus: Mapping[str, Gpu]) -> tuple[str, str]:
    """Return value and interval, or that the model cannot say and why."""
    if unknown := one.unknown(gpus, calibration()):
        return "cannot say", unknown
    value, half = one.value(gpus, calibration()), one.half(gpus, calibration())
    return _rounded(value), f"{value * math.exp(-half):.3g} to {value * math.exp(half):.3g}"


def write_picture(path: Path, gpus: Mapping[str, Gpu]) -> None:
    """Draw predicted over published times of all held-out rows."""
    figure = Figure(figsize=(7, 5))
    axes = figure.add_subplot()
    groups: defaultdict[str, list[Residual]] = defaultdict(list)
    for one in residuals(gpus, calibration()):
        groups[f"{gpus[one.row.gpu].name}, {one.row.software}"].append(one)
    for mark, (label, group) in zip("os^vD*XP", sorted(groups.items()), strict=False):
        published = [one.row.seconds for one in group]
        axes.scatter(published, [1 + one.error for one in group], s=14, alpha=0.6, marker=mark, label=label)
    axes.axhline(1, color="0.4", linewidth=1)
    axes.set(xscale="log", xlabel="published time of a step, s", ylabel="predicted over published")
    axes.set_ylim(0.6, 1.6)
    axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _billions(one: Residual) -> str:
    # Models of one size have other rows of positions at other sequences.
    count = one.row.shape.model_copy(update={"sequence": 2048}).parameters()
    return f"{count / 1e9:.2g}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def _high(errors: list[float]) -> float:
    return quantiles(errors, n=20)[-1] if len(errors) > 1 else errors[0]


def _covered(group: Sequence[Residual]) -> float:
    return mean(one.covered for one in group)
