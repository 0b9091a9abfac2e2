"""Fit the figures of src/twinrun/predict/calibration.toml on the rows of rows.csv whose part is `fit`.

`python -m tools.fit_predictions [SOFTWARE ...]` prints each fitted figure beside the calibration's, and the
error of both on the fitted rows; it reads no row of the part `test`. The search starts at the calibration and
moves one figure at a time by a share that halves, until nothing lowers the mean of a loss that grows with the
square of small errors and with the size of large ones, so that a row that is wrong weighs little. Products on
A100 are one figure for all software and are not moved here.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from twinrun.foundation.text import markdown_table
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import Calibration, KernelShape, calibration
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.predict.rows import rows
from twinrun.predict.step import step_time
from twinrun.protocol.models.shape import ModelWork

ROOT = Path(__file__).resolve().parents[1]
# Shares that a figure is moved by, and of the loss that a move must save.
FIRST_STEP, LAST_STEP, LEAST_GAIN = 0.16, 0.005, 1e-4
# What of a generation of software was fitted; its other figures are measured, counted, or round.
FITTED: Mapping[str, tuple[str, ...]] = {
    "twinrun-2026": ("links", "products"),
    "torchtitan-2025": ("products", "fp8"),
    "megatron-2025": ("fp8",),
    "torchtitan-eager": ("products",),
    "foundry-2023-10": ("recomputed", "products", "attention"),
    "foundry-2023-07": ("recomputed", "attention"),
    "megatron-2022": ("elements", "logits", "host", "tensor_host", "gradients", "step", "unfused"),
}
TABLES = ("products", "fp8", "attention")
# Figures that are not moved: one of all software, and one that a kernel's own table says.
HELD = (("products", "a100-40gb"), ("products", "a100-80gb"), ("attention", "mi250"))
# An error, as a logarithm, from which on it counts by its size.
LARGE = 0.05
# Rounds in which the factors of kernel shapes settle.
ROUNDS = 4


@dataclass(frozen=True)
class FittedFigure:
    """One number of a software, of one GPU where it is a table."""

    software: str
    name: str
    gpu: str | None = None

    def __str__(self) -> str:
        return ".".join(filter(None, (self.name, self.gpu)))

    def of(self, known: Calibration) -> float:
        """Return its value."""
        found = getattr(known.of(self.software), self.name)
        return float(found[self.gpu] if self.gpu else found)

    def moved(self, known: Calibration, factor: float) -> Calibration:
        """Return a calibration in which it is `factor` times as large."""
        own = known.of(self.software)
        table = getattr(own, self.name)
        value = table | {self.gpu: table[self.gpu] * factor} if self.gpu else table * factor
        changed = own.model_copy(update={self.name: value})
        others = (changed if one.id == own.id else one for one in known.software)
        return known.model_copy(update={"software": tuple(others)})


def figures(known: Calibration, software: str, gpus: Sequence[str]) -> list[FittedFigure]:
    """Return the fitted figures of a software, those of GPUs that a fitted row ran on."""
    return [
        FittedFigure(software, name, gpu)
        for name in FITTED[software]
        for gpu in (gpus if name in TABLES else [None])
        if gpu is None or (gpu in getattr(known.of(software), name) and (name, gpu) not in HELD)
    ]


@dataclass(frozen=True)
class FittedRow:
    """A row with what the model asks of it."""

    seconds: float
    work: ModelWork
    machines: Machines
    layout: ParallelLayout

    def error(self, known: Calibration, software: str) -> float:
        """Return the logarithm of predicted over published time."""
        terms = {"software": known.of(software), "calibration": known}
        found = step_time(self.work, self.machines, self.layout, **terms)  # type: ignore[arg-type]
        return math.log(found.seconds / self.seconds)


def fitted_rows(software: str, gpus: Mapping[str, Gpu]) -> tuple[list[FittedRow], list[str]]:
    """Return the rows that a software is fitted on, and the GPUs that they ran on."""
    mine = [row for row in rows() if row.part == "fit" and row.software == software]
    own = calibration().of(software)
    asked = [FittedRow(row.seconds, row.shape.work(), row.machines(gpus), row.layout(own)) for row in mine]
    return asked, sorted({row.gpu for row in mine})


def loss(known: Calibration, software: str, mine: Sequence[FittedRow]) -> float:
    """Return the mean of 2 L^2 (sqrt(1 + (e / L)^2) - 1) over the errors e: e^2 where it is small."""
    errors = (row.error(known, software) for row in mine)
    return mean(2 * LARGE**2 * (math.sqrt(1 + (error / LARGE) ** 2) - 1) for error in errors)


def kernel_shapes(known: Calibration, software: str, mine: Sequence[FittedRow]) -> tuple[KernelShape, ...]:
    """Return the timed shapes of a software with the factors that the middle of their rows asks for."""
    own = known.of(software)
    for _ in range(ROUNDS):
        errors: defaultdict[KernelShape, list[float]] = defaultdict(list)
        now = known.model_copy(update={"software": (own,)})
        for row in mine:
            for shape in own.shapes:
                tokens = row.layout.microbatch * row.work.sequence
                if (shape.width, shape.tensor, shape.tokens) == (
                    row.work.block.width,
                    row.layout.tensor,
                    tokens,
                ):
                    errors[shape].append(row.error(now, software))
        settled = [
            one.model_copy(update={"factor": one.factor * math.exp(-median(errors[one]))})
            if one in errors
            else one
            for one in own.shapes
        ]
        own = own.model_copy(update={"shapes": tuple(settled)})
    return own.shapes


def fit(known: Calibration, software: str, mine: Sequence[FittedRow], gpus: Sequence[str]) -> Calibration:
    """Return the calibration whose figures of `software` have the least loss nearby; the same every time."""
    least, step = loss(known, software, mine), FIRST_STEP
    while step >= LAST_STEP:
        better = False
        for figure in figures(known, software, gpus):
            for factor in (1 + step, 1 / (1 + step)):
                tried = figure.moved(known, factor)
                found = loss(tried, software, mine)
                if found < least * (1 - LEAST_GAIN):
                    known, least, better = tried, found, True
        step = step if better else step / 2
    return known


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the fit of the generations of software that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("software", nargs="*", metavar="SOFTWARE", help="all when left out")
    options = parser.parse_args(arguments)
    gpus, known = Project(ROOT).gpus, calibration()
    for software in options.software or FITTED:
        mine, seen = fitted_rows(software, gpus)
        fitted = fit(known, software, mine, seen)
        before, after = (math.sqrt(loss(one, software, mine)) for one in (known, fitted))
        print(f"\n## {software}\n\nError of {len(mine)} rows: {before:.4f}, fitted {after:.4f}.\n")
        lines = [
            (str(one), f"{has:.4g}", f"{gets:.4g}", f"{gets / has - 1:+.1%}")
            for one in figures(known, software, seen)
            for has, gets in [(one.of(known), one.of(fitted))]
        ]
        timed = zip(known.of(software).shapes, kernel_shapes(known, software, mine), strict=True)
        lines += [
            (
                f"{one.width:.0f} x {one.tensor:.0f}, {one.tokens:.0f} tokens",
                f"{one.factor:.3f}",
                f"{two.factor:.3f}",
                f"{two.factor / one.factor - 1:+.1%}",
            )
            for one, two in timed
        ]
        print(markdown_table(("figure", "calibration", "fitted", "change"), lines))


if __name__ == "__main__":
    main()
