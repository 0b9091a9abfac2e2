"""Fit the effects that rates are made of on all rows, and write `src/twinrun/predict/effects.csv`.

`python -m tools.fit_predictions` writes it; with `--score` it leaves each source out whole and writes into
`scores.csv` how far predictions of it are off: without a run of it, with one, and with three.

Deviations of effects follow from the effects themselves, as far as there are enough of a level (an inverse
gamma of four degrees about those that calibration.toml starts from).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

import numpy as np
from pydantic import Field
from scipy.linalg import solve_triangular
from scipy.optimize import least_squares

from twinrun.foundation.manifest import load_rows
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict import calibration as fitted
from twinrun.predict.calibration import UNSEEN, Calibration, Effect, Key, Run, Subject
from twinrun.predict.claims import Score
from twinrun.predict.configured_model import of_config
from twinrun.predict.parallel_layout import Cuts, Machines, ParallelLayout
from twinrun.predict.step import IDEAL
from twinrun.protocol.models import ModelShape, member
from twinrun.protocol.models.mpt import MptShape

ROOT = Path(__file__).resolve().parents[1]
TABLES = fitted.EFFECTS.parent
# The config.json of models that rows name.
CONFIGS = json.loads((TABLES / "configs.json").read_text(encoding="utf-8"))
Array: TypeAlias = Any
# Rounds of effects and deviations, evaluations of each, deviations from which on an error counts by its size;
# degrees of freedom of the deviations' prior, directions that are kept, and effects of a level of which no
# deviation is learned.
ROUNDS, EVALUATIONS, LARGE, DEGREES, DIRECTIONS, FEW = 2, 8, 2.0, 4.0, 48, 2


class Row(Cuts):
    """One line of rows.csv."""

    source: str
    software: str
    gpu: str
    devices_per_node: int
    """Devices that links join: of a rack of GB200 all that the run used of it."""
    nodes: int
    network_gbit: float
    model: str
    """Member of a family, a key of configs.json, or nothing for a GPT of the sizes that follow."""
    width: int
    heads: int
    layers: int
    vocabulary: int
    sequence: int
    microbatch: int
    seconds: float = Field(gt=0)
    """Seconds of an optimizer step, as published or as recorded."""
    peak_gib: float
    """Memory of a device at its most, as published or as recorded; 0 where nobody says it."""

    @property
    def shape(self) -> ModelShape:
        """The model."""
        if config := CONFIGS.get(self.model):
            return of_config(config, sequence=self.sequence, file=self.model)[0]
        if self.model:
            return member(f"{self.model}-{self.sequence}", place="rows.csv")
        return MptShape(**self.model_dump(include={"width", "heads", "layers", "vocabulary", "sequence"}))

    def run(self, gpus: Mapping[str, Gpu], known: Calibration) -> Run:
        """Return what ran, and how long its step took."""
        software = known.of(self.software)
        layout = software.applied(ParallelLayout.of(self, microbatch=self.microbatch))
        machines = Machines.of(gpus[self.gpu], self.nodes, self.devices_per_node, self.network_gbit or None)
        return Run(Subject(self.shape, machines, layout, software, self.source), self.seconds)


@cache
def rows() -> tuple[Row, ...]:
    """Return all rows."""
    return load_rows(TABLES / "rows.csv", Row)


def fit(runs: Sequence[Run], known: Calibration, *, rounds: int = 1, learn: bool = False) -> Calibration:
    """Return the calibration with the effects of most probability, and how the rows narrow them.

    Args:
        known: where it starts from.
        learn: whether deviations of effects are learned, too.
    """
    index: dict[Key, int] = {}
    where = [
        {rate: [index.setdefault(key, len(index)) for key in run.subject.keys(rate, known)] for rate in IDEAL}
        for run in runs
    ]
    effects = np.array([known.effect(key).mean for key in index])
    spread = np.array([known.effect((*key[:2], UNSEEN)).spread for key in index])
    # What rows of one model, layout or run have alone is nobody else's: it is the noise of the others.
    alone = np.array([key[1].endswith(fitted.ALONE) for key in index])
    slower, table = np.zeros(len(runs)), np.zeros((len(runs), len(index)))

    def errors(scaled: Array) -> Array:
        """Return what is to be small: errors of rows, and effects over their deviations."""
        effects[~alone] = scaled * spread[~alone]
        for number, (run, found) in enumerate(zip(runs, where, strict=True)):
            sums = {rate: effects[some].sum() for rate, some in found.items()}
            rates = {rate: known.rate[rate].middle * math.exp(one) for rate, one in sums.items()}
            slower[number] = math.log(run.seconds / run.subject.at(rates).seconds)
            for rate, slope in fitted.slopes(run.subject, rates).items():
                table[number, found[rate]] = slope
        return np.concatenate([solve_triangular(root, slower, lower=True), scaled])

    def slopes(scaled: Array) -> Array:
        """Return derivatives where errors were asked for last."""
        narrow = solve_triangular(root, table[:, ~alone] * spread[~alone], lower=True)
        return np.vstack([-narrow, np.eye(len(scaled))])

    for _ in range(rounds):
        root, effects[alone] = np.eye(len(runs)), 0.0
        errors(effects[~alone] / spread[~alone])
        own = table[:, alone] * spread[alone]
        root = np.linalg.cholesky(own @ own.T)
        terms = {"jac": slopes, "loss": "soft_l1", "f_scale": LARGE, "max_nfev": EVALUATIONS}
        best = least_squares(errors, effects[~alone] / spread[~alone], **terms).x
        weight = np.sqrt(1 + (errors(best)[: len(runs)] / LARGE) ** 2) ** -0.5
        narrow = weight[:, None] * slopes(best)[: len(runs)]
        after = np.linalg.inv(np.eye(len(best)) + narrow.T @ narrow)
        # Mean squares of each effect, in deviations of it.
        gain, before, squares = np.linalg.solve(own @ own.T, own), spread, np.zeros(len(spread))
        squares[~alone] = best**2 + np.diag(after)
        squares[alone] = (gain.T @ slower) ** 2 + 1 - (own * gain).sum(axis=0)
        spread = learned(index, known, spread**2 * squares) if learn else spread
    values, vectors = np.linalg.eigh(np.eye(len(after)) - after)
    directions = (vectors * np.sqrt(np.clip(values, 0, 1)))[:, ::-1][:, :DIRECTIONS]
    keys, every = [*index], dict[Key, Effect]()
    for number, some in zip(np.flatnonzero(~alone), directions, strict=True):
        every[keys[number]] = Effect(float(effects[number]), float(before[number]), tuple(map(float, some)))
    every |= {(*key[:2], UNSEEN): Effect(0.0, float(before[number])) for key, number in index.items()}
    return known.model_copy(update={"effects": every})


def learned(keys: Iterable[Key], known: Calibration, squares: Array) -> Array:
    """Return the deviations of effects by level, given the mean squares of each."""
    found, levels = np.zeros(len(squares)), [key[:2] for key in keys]
    for rate, level in dict.fromkeys(levels):
        several, stated = [one == (rate, level) for one in levels], known.rate[rate].spread[level]
        total, count = DEGREES * stated**2 + squares[several].sum(), DEGREES + sum(several)
        found[several] = math.sqrt(total / count) if sum(several) > FEW else stated
    return found


def score(mine: Sequence[Run], known: Calibration, anchors: int) -> tuple[float, ...]:
    """Return mean error, bias, coverage and interval of runs, each given `anchors` others of them."""
    found = []
    for number, run in enumerate(mine):
        gpu = run.subject.machines.gpu
        same = [other for other in mine if other is not run and other.subject.machines.gpu == gpu]
        step = len(same) // anchors or 1 if anchors else 1
        said = fitted.told(run.subject, same[number % step :: step][:anchors], known)
        error = math.log(said.seconds / run.seconds)
        found.append((abs(math.expm1(error)), math.expm1(error), abs(error) <= said.half, said.half))
    return tuple(map(mean, zip(*found, strict=True)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the effects, or the scores of sources that are left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--score", action="store_true", help="leave each source out")
    options, known, gpus = parser.parse_args(arguments), fitted.calibration(), Project(ROOT).gpus
    runs, lines = [row.run(gpus, known) for row in rows()], [tuple(Score.model_fields)]
    if not options.score:
        found = fit(runs, known.model_copy(update={"effects": {}}), rounds=ROUNDS, learn=True).effects
        figures = {key: (one.mean, one.spread, *one.directions) for key, one in sorted(found.items())}
        lines = [(*key, *(f"{number:.4g}" for number in some)) for key, some in figures.items()]
    for source in known.source if options.score else ():
        left = fit([run for run in runs if run.subject.place != source], known)
        mine = [run for run in runs if run.subject.place == source]
        for anchors in (one for one in (0, 1, 3) if len(mine) > one):
            said = (f"{one:.4f}" for one in score(mine, left, anchors))
            lines.append((source, str(len(mine)), str(anchors), *said))
            print(*lines[-1], flush=True)
    path = TABLES / "scores.csv" if options.score else fitted.EFFECTS
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


if __name__ == "__main__":
    main()
