"""What was fitted beforehand: rates of hardware and software with what is known of them, as data.

The logarithm of a rate is the sum of a middle and of effects: of all rows, of a vendor, an architecture, a
GPU, a software, a precision, a software on an architecture, and of steps away from usual sizes. An effect is
Gaussian about zero before any row is seen. `effects.csv` has what rows leave of them: the mean of each, its
deviation before, and directions in which rows narrowed it. What no row has seen keeps all of its deviation,
so that an interval is as wide as what nobody measured. `python -m tools.fit_predictions` writes the file.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from twinrun.foundation.errors import require_known
from twinrun.foundation.manifest import Frozen, load_toml
from twinrun.predict.parallel_layout import Machines, ParallelLayout, Software
from twinrun.predict.step import IDEAL, Step, StepTime
from twinrun.protocol.models.shape import ModelShape, ModelWork

EFFECTS = Path(__file__).with_name("effects.csv")
# The generation of software that this project's loops are.
SOFTWARE = "twinrun-2026"
# Of a step's time itself rather than of a rate.
TIME = "time"
# Levels of what runs of a model, those of a layout, and a run have alone; those of experts scatter more.
ALONE = ("model", "layout", "run")
# Name of the line with the deviation of effects that no row has seen.
UNSEEN = "*"
# Devices of the largest rack, and Gbit/s of a device, that sizes are doublings of.
RACK, SPEED = 72, 400
# Deviations to either side that hold nine of ten.
NINETY = 1.645
# Of a logarithm, by which derivatives are taken.
STEP = 0.01
Key = tuple[str, str, str]
"""A rate, a level and a name of the level."""


class Prior(Frozen):
    """What is taken of a rate before any row is seen."""

    middle: float
    spread: dict[str, float]
    """Deviation of its logarithm by level, from which the fit starts."""


class Effect(NamedTuple):
    """What rows leave of one effect."""

    mean: float
    spread: float
    """Its deviation before any row."""
    directions: tuple[float, ...] = ()
    """Shares of the deviation that rows took away, by direction."""


class Calibration(Frozen):
    """predict/calibration.toml."""

    version: int
    wide: float
    """Half of an interval, as a logarithm, beyond which nothing is said."""
    rate: dict[str, Prior]
    software: tuple[Software, ...]
    level: dict[str, str]
    """How levels are called where no row has one."""
    source: dict[str, str]
    """Where the rows of rows.csv are from."""

    def of(self, software: str) -> Software:
        """Return a generation of software by its id; raises InputError where there is none."""
        known = {one.id: one for one in self.software}
        require_known(software, known, "no such software", place="--software")
        return known[software]

    @cached_property
    def effects(self) -> Mapping[Key, Effect]:
        """The fitted effects."""
        with EFFECTS.open(encoding="utf-8", newline="") as file:
            lines = [((a, b, c), [*map(float, more)]) for a, b, c, *more in csv.reader(file)]
        return {key: Effect(mean, spread, tuple(most)) for key, (mean, spread, *most) in lines}

    def effect(self, key: Key) -> Effect:
        """Return an effect; one that no row has seen has a mean of zero."""
        found = self.effects.get(key) or self.effects.get((*key[:2], UNSEEN))
        return found or Effect(0.0, self.rate[key[0]].spread[key[1]])


@cache
def calibration() -> Calibration:
    """Return the calibration that this version of twinrun predicts by."""
    return load_toml(Path(__file__).with_name("calibration.toml"), Calibration)


@dataclass(frozen=True)
class Subject:
    """A training that is asked about, or that ran."""

    shape: ModelShape
    machines: Machines
    layout: ParallelLayout
    software: Software
    place: str = "here"
    """Who runs it: a source of rows, or whoever asks."""

    @cached_property
    def work(self) -> ModelWork:
        """What a pass of its model has to do."""
        return self.shape.work()

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the levels that it belongs to; of a size one for each doubling away from the usual."""
        gpu, software, layout, machines = self.machines.gpu, self.software.id, self.layout, self.machines
        block = self.work.block
        experts = any(one.experts > 1 for one in block.products)
        kind = "experts" if experts else "scan" if block.scanned else "dense"
        model = f"{software} {gpu.id} {block.width} {self.shape.sequence}"
        cut = (layout.tensor, layout.pipeline, layout.context, layout.experts, layout.recomputation)
        network = (machines.network or 0.0) * 8e-9 / machines.devices_per_node
        # Each size, and the usual one; a rack is a node that is larger than any.
        sizes = {
            "node": (machines.devices_per_node, 8),
            "rack": (max(RACK, machines.devices_per_node), RACK),
            "devices": (machines.devices, 8),
            "speed": (network if machines.nodes > 1 else SPEED, SPEED),
            "parameters": (self.shape.parameters(), 8e9),
            "sequence": (self.shape.sequence, 4096),
            "tokens": (layout.microbatch * self.shape.sequence / layout.context, 16384),
        }
        steps = {name: tuple(_steps(value / usual)) for name, (value, usual) in sizes.items()}
        return {
            "all": ("all",),
            "vendor": (gpu.vendor,),
            "arch": (gpu.arch,),
            "gpu": (gpu.id,),
            "software": (software,),
            "precision": (layout.precision,),
            "precision-on": (f"{layout.precision} {gpu.arch}",),
            "pair": (f"{software} {gpu.arch}",),
            "kind": (kind,),
            "kind-of": (f"{kind} {software}",),
            "place": (f"{self.place} {software} {gpu.id}",),
            f"{kind}-model": (model,),
            f"{kind}-layout": (" ".join(map(str, (model, layout.precision, layout.microbatch, *cut))),),
            f"{kind}-run": (str(id(self)),),
            **steps,
            "tokens-of": tuple(f"{step} {software}" for step in steps["tokens"]),
        }

    def at(self, rates: Mapping[str, float]) -> StepTime:
        """Return the time of a step at rates."""
        step = Step(self.work, self.machines, self.layout, self.software, rates)
        return StepTime(*(rates[TIME] * seconds for seconds in step.time()))

    def keys(self, rate: str, known: Calibration) -> Iterator[Key]:
        """Yield the effects whose sum a rate's logarithm is."""
        return (
            (rate, level, name) for level in known.rate[rate].spread for name in self.names.get(level, ())
        )


def _steps(ratio: float) -> Iterator[str]:
    """Yield a name for each doubling, or halving, of a size."""
    count = round(math.log2(ratio)) if ratio > 0 else 0
    return (f"{'+' if count > 0 else '-'}{step}" for step in range(1, abs(count) + 1))


class Run(NamedTuple):
    """A training that ran, and the seconds that its step took."""

    subject: Subject
    seconds: float


def rates_of(subject: Subject, known: Calibration) -> dict[str, float]:
    """Return the fitted rates of a subject."""
    return {
        rate: known.rate[rate].middle
        * math.exp(sum(known.effect(key).mean for key in subject.keys(rate, known)))
        for rate in IDEAL
    }


def weights_of(subject: Subject, known: Calibration) -> dict[Key, float]:
    """Return how much each effect moves the time of a subject: derivatives of its logarithm."""
    found = slopes(subject, rates_of(subject, known)).items()
    return {key: slope for rate, slope in found if slope for key in subject.keys(rate, known)}


def slopes(subject: Subject, rates: Mapping[str, float]) -> dict[str, float]:
    """Return the derivative of the logarithm of a step's time by that of each rate."""
    now = math.log(subject.at(rates).seconds)
    return {
        rate: (math.log(subject.at({**rates, rate: value * math.exp(STEP)}).seconds) - now) / STEP
        for rate, value in rates.items()
    }


class Told(NamedTuple):
    """What is known of a time that is asked about."""

    time: StepTime
    """By the fitted rates alone."""
    seconds: float
    """Seconds of a step, by runs too."""
    half: float
    """Half of the 90 % interval, as a logarithm."""
    half_without_runs: float


def told(subject: Subject, runs: Sequence[Run] = (), known: Calibration | None = None) -> Told:
    """Return the time of a step, and what runs change of it: a linear Gaussian update.

    Args:
        known: another calibration than the one of this version.
    """
    # Few commands predict, and numpy takes long to import.
    import numpy as np  # noqa: PLC0415

    known, every = known or calibration(), [*(run.subject for run in runs), subject]
    weights = [weights_of(one, known) for one in every]
    keys = list(dict.fromkeys(key for one in weights for key in one))
    effects = [known.effect(key) for key in keys]
    most = max(len(one.directions) for one in effects)
    directions = np.array([one.directions or (0.0,) * most for one in effects])
    # How much each effect moves each time, in deviations of it, and what rows took away of these.
    moved = np.array([[one.get(key, 0.0) for key in keys] for one in weights])
    moved = moved * [one.spread for one in effects]
    narrowed = moved @ directions
    both = moved @ moved.T - narrowed @ narrowed.T
    *others, time = (one.at(rates_of(one, known)) for one in every)
    slower = [math.log(run.seconds / other.seconds) for run, other in zip(runs, others, strict=True)]
    gain = np.linalg.lstsq(both[:-1, :-1], both[:-1, -1], rcond=None)[0]
    spread = math.sqrt(both[-1, -1] - gain @ both[:-1, -1])
    seconds = time.seconds * math.exp(gain @ slower)
    return Told(time, seconds, NINETY * spread, NINETY * math.sqrt(both[-1, -1]))
