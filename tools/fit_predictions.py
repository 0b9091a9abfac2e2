"""Fit the effects that rates are made of on all rows, and write `src/twinrun/predict/effects.csv`.

`python -m tools.fit_predictions` writes it; with `--score` it leaves each source out whole and writes into
`scores.csv` how far predictions of it are off: without a run of it, with one, and with three.

Of runs, what those of one model and of one layout share is one covariance matrix, whose three deviations are
chosen with the effects, by the likelihood. Deviations of effects follow from the effects themselves, as far
as there are enough (an inverse gamma of four degrees about those that calibration.toml starts from).
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import least_squares, minimize

from twinrun.planning.project import Project
from twinrun.predict import calibration as fitted
from twinrun.predict.calibration import EXPERTS, OWN, TIME, UNSEEN, Calibration, Effect, Key, Run, told
from twinrun.predict.rows import ROWS, Score, rows
from twinrun.predict.step import IDEAL

ROOT = Path(__file__).resolve().parents[1]
SCORES = ROWS.with_name("scores.csv")
Array: TypeAlias = Any
Seen: TypeAlias = Callable[[Any], tuple[Any, Any]]
# Rounds of effects and deviations, degrees of freedom of the latter's prior, directions that are kept,
# deviations from which on an error counts by its size, and effects of which no deviation is learned.
ROUNDS, DEGREES, DIRECTIONS, LARGE, FEW = 2, 4.0, 48, 2.0, 2


class Fitting:
    """Rows with the effects that move their times."""

    def __init__(self, runs: Sequence[Run], known: Calibration) -> None:
        self.runs, self.known, self.levels = runs, known, OWN + EXPERTS
        index: dict[Key, int] = {}
        self.where = [
            {
                rate: [index.setdefault(key, len(index)) for key in keys if key[1] not in self.levels]
                for rate in (*IDEAL, TIME)
                for keys in [run.subject.keys(rate, known.rate[rate])]
            }
            for run in runs
        ]
        self.keys = [*index]
        self.start = np.array([known.rate[rate].spread[level] for rate, level, _ in self.keys])
        models = defaultdict(list)
        for number, run in enumerate(runs):
            models[run.subject.names[run.subject.own[0]]].append(number)
        # Rows that share a model, and which of them share a layout.
        layouts = [run.subject.names[run.subject.own[1]] for run in runs]
        self.groups = [
            (group, np.array([[layouts[a] == layouts[b] for b in group] for a in group]))
            for group in models.values()
        ]

    def seen(self, effects: Array) -> tuple[Array, Array]:
        """Return the logarithms of predicted over measured times, and their derivatives."""
        missed, table = np.zeros(len(self.runs)), np.zeros((len(self.runs), len(effects)))
        for number, (run, where) in enumerate(zip(self.runs, self.where, strict=True)):
            sums = {rate: effects[found].sum() for rate, found in where.items()}
            rates = {rate: self.known.rate[rate].middle * math.exp(sums[rate]) for rate in IDEAL}
            missed[number] = math.log(run.subject.time(rates).seconds / run.seconds) + sums[TIME]
            for rate, slope in {**fitted.slopes(run.subject, rates), TIME: 1.0}.items():
                table[number, where[rate]] = slope
        return missed, table

    def white(self, values: Array, noise: Array) -> tuple[Array, float]:
        """Return rows' values so that their noise is independent and of one, and its log determinant."""
        found, logs = np.empty_like(values), 0.0
        for group, same in self.groups:
            model, layout, run = noise[3:] if self.runs[group[0]].subject.own is EXPERTS else noise[:3]
            root = np.linalg.cholesky(model**2 + layout**2 * same + run**2 * np.eye(len(group)))
            found[group] = solve_triangular(root, values[group], lower=True)
            logs += float(np.log(np.diag(root)).sum())
        return found, logs

    def errors(self, at: Seen, spread: Array, noise: Array, scaled: Array) -> Array:
        """Return what is to be small: errors of rows, and effects over their deviations."""
        return np.concatenate([self.white(at(scaled * spread)[0], noise)[0], scaled])

    def slopes(self, at: Seen, spread: Array, noise: Array, scaled: Array) -> Array:
        """Return its derivatives."""
        return np.vstack([self.white(at(scaled * spread)[1] * spread, noise)[0], np.eye(len(scaled))])

    def fit(self, rounds: int = ROUNDS, *, settled: bool = False) -> dict[Key, Effect]:
        """Return the effects of most probability, and how the rows narrow them.

        Args:
            settled: deviations are those of the calibration's effects, not those of its priors.
        """
        effects, known = np.zeros(len(self.keys)), self.known if settled else self.known.fitted({})
        spread = np.array([known.effect((*key[:2], UNSEEN)).spread for key in self.keys])
        noise = np.array([known.effect((TIME, level, UNSEEN)).spread for level in self.levels])
        kept_last = lru_cache(2)(lambda effects: self.seen(np.frombuffer(effects)))
        at: Seen = lambda effects: kept_last(effects.tobytes())  # noqa: E731
        for _ in range(rounds):
            errors, table_of = (
                partial(self.errors, at, spread, noise),
                partial(self.slopes, at, spread, noise),
            )
            terms = {"jac": table_of, "loss": "soft_l1", "f_scale": LARGE, "max_nfev": 12}
            effects = least_squares(errors, effects / spread, **terms).x * spread
            missed, table = at(effects)
            weight = 1 / np.sqrt(1 + (self.white(missed, noise)[0] / LARGE) ** 2)
            narrow = np.sqrt(weight)[:, None] * self.white(table * spread, noise)[0]
            after = np.linalg.inv(np.eye(len(effects)) + narrow.T @ narrow)
            old, spread = spread, self.spreads(effects**2 + np.diag(after) * spread**2)
            noise = self.noise(missed, noise)
        values, vectors = np.linalg.eigh(np.eye(len(effects)) - after)
        most = np.argsort(values)[::-1][:DIRECTIONS]
        directions = vectors[:, most] * np.sqrt(np.clip(values[most], 0, 1))
        kept = {
            key: Effect(float(effects[number]), float(old[number]), tuple(map(float, directions[number])))
            for number, key in enumerate(self.keys)
        }
        kept |= {(*key[:2], UNSEEN): Effect(0.0, one.spread) for key, one in kept.items()}
        own = zip(self.levels, noise, strict=True)
        return kept | {(TIME, level, UNSEEN): Effect(0.0, float(one)) for level, one in own}

    def spreads(self, squares: Array) -> Array:
        """Return the deviations of effects by level, given the mean squares of each."""
        found, groups = self.start.copy(), defaultdict(list)
        for number, key in enumerate(self.keys):
            groups[key[:2]].append(number)
        for several in (one for one in groups.values() if len(one) > FEW):
            total = DEGREES * self.start[several[0]] ** 2 + squares[several].sum()
            found[several] = math.sqrt(total / (DEGREES + len(several)))
        return found

    def noise(self, missed: Array, start: Array) -> Array:
        """Return the most probable deviations of what models, layouts and runs have alone."""

        def against(logs: Array) -> float:
            apart, size = self.white(missed, np.exp(logs))
            return float(size + (apart**2).sum() / 2 + ((logs - np.log(start)) ** 2).sum())

        return np.exp(minimize(against, np.log(start), method="Nelder-Mead", options={"maxfev": 120}).x)


def score(mine: Sequence[Run], known: Calibration, anchors: int) -> tuple[float, ...]:
    """Return mean error, bias, coverage and interval of runs, each given `anchors` others of them."""
    found = []
    for number, run in enumerate(mine):
        gpu = run.subject.machines.gpu
        same = [other for other in mine if other is not run and other.subject.machines.gpu == gpu]
        some = tuple(
            same[number % (len(same) // anchors or 1) :: len(same) // anchors or 1] if anchors else ()
        )
        said = told(run.subject, fitted.Basis(run.subject.software, known, some[:anchors]))
        error = math.log(said.seconds / run.seconds)
        found.append((abs(math.expm1(error)), math.expm1(error), abs(error) <= said.half, said.half))
    return tuple(map(mean, zip(*found, strict=True)))


def written(path: Path, lines: Iterable[Iterable[object]]) -> None:
    """Write a table without heads."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the effects, or the scores of sources that are left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--score", action="store_true", help="leave each source out")
    options, known, gpus = parser.parse_args(arguments), fitted.calibration(), Project(ROOT).gpus
    runs, lines = [(row.source, row.run(gpus, known)) for row in rows()], [tuple(Score.model_fields)]
    if not options.score:
        found = sorted(Fitting([run for _, run in runs], known).fit().items())
        both = zip(found, [(one.mean, one.spread, *one.directions) for _, one in found], strict=True)
        written(fitted.EFFECTS, ([*key, *(f"{number:.4g}" for number in line)] for (key, _), line in both))
        return
    for source in known.source:
        left = Fitting([run for one, run in runs if one != source], known).fit(1, settled=True)
        mine = [run for one, run in runs if one == source]
        for anchors in (one for one in (0, 1, 3) if len(mine) > one):
            figures = [f"{one:.4f}" for one in score(mine, known.fitted(left), anchors)]
            lines.append((source, str(len(mine)), str(anchors), *figures))
            print(*lines[-1], flush=True)
    written(SCORES, lines)


if __name__ == "__main__":
    main()
