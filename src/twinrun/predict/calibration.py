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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, get_args

from twinrun.foundation.errors import require_known
from twinrun.foundation.manifest import Frozen, load_toml
from twinrun.predict.kernel_times import scan_of
from twinrun.predict.parallel_layout import Machines, ParallelLayout, Shards
from twinrun.predict.step import IDEAL, StepTime, Traits, step_time
from twinrun.protocol.models.shape import ModelShape, ModelWork

EFFECTS = Path(__file__).with_name("effects.csv")
# The generation of software that this project's loops are.
SOFTWARE = "twinrun-2026"
# Of a step's time itself rather than of a rate: what is shared by runs of a model, by those of a layout, and
# by nothing. Nobody else has them.
TIME = "time"
OWN, EXPERTS = ("model", "layout", "run"), ("experts-model", "experts-layout", "experts-run")
# Name of the line with the deviation of effects that no row has seen.
UNSEEN = "*"
# What sizes are doublings of: devices of a node, and of one larger than any rack; of all; Gbit/s of one, ...
USUAL: Mapping[str, float] = {
    "node": 8,
    "rack": 72,
    "devices": 8,
    "speed": 400,
    "parameters": 8e9,
    "sequence": 4096,
}
Cut = Literal["tensor", "pipeline", "interleaved", "context", "experts", "sequence_parallel", "zero_bubble"]
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


class Software(Frozen):
    """A generation of a training framework."""

    id: str
    title: str
    cuts: frozenset[Cut]
    """What it cuts a model by."""
    shards: dict[Shards, bool]
    """What it splits over data-parallel ranks, and whether with stages or cut matrices too."""
    unfused: bool = False
    masters: bool = False
    """Whether it trains fp32 copies of 16-bit parameters."""
    summed_bytes: int | None = None
    selective_products: float = 0.0
    source: str

    def applied(self, layout: ParallelLayout) -> ParallelLayout:
        """Return a layout with what the software decides: types of states, and attention matrices."""
        mixed = {"parameter_bytes": 2, "masters": True} if self.masters else {}
        return replace(layout, scores_kept=self.unfused, **mixed)  # type: ignore[arg-type]

    def refuses(self, layout: ParallelLayout) -> str | None:
        """Return what of a layout it does not have; None where it has all."""
        for name in get_args(Cut):
            if (getattr(layout, name) is True or getattr(layout, name) > 1) and name not in self.cuts:
                return str(name)
        if layout.tensor * layout.pipeline > 1 and not self.shards.get(layout.shards, True):
            return f"shards={layout.shards} with tensor or pipeline"
        return None if layout.shards in self.shards else f"shards={layout.shards}"


@dataclass(frozen=True)
class Effect:
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
        found: dict[Key, Effect] = {}
        with EFFECTS.open(encoding="utf-8", newline="") as file:
            for rate, level, name, mean, spread, *directions in csv.reader(file):
                found[rate, level, name] = Effect(float(mean), float(spread), tuple(map(float, directions)))
        return found

    def fitted(self, effects: Mapping[Key, Effect]) -> Calibration:
        """Return it with other effects than those of the file."""
        found = self.model_copy()
        found.__dict__["effects"] = effects
        return found

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
    def traits(self) -> Traits:
        """What the software does on the GPU."""
        one = self.software
        scan = scan_of(self.machines.gpu)
        return Traits(one.unfused, one.summed_bytes, one.selective_products, scan)

    @property
    def own(self) -> tuple[str, str, str]:
        """Levels of what its model, its layout and its run have alone; experts scatter more."""
        return EXPERTS if max(one.experts for one in self.work.block.products) > 1 else OWN

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the levels that it belongs to; of a size one for each doubling away from the usual."""
        gpu, software, layout, machines = self.machines.gpu, self.software.id, self.layout, self.machines
        block = self.work.block
        kind = "scan" if block.scanned else "experts" if self.own is EXPERTS else "dense"
        model = f"{software} {gpu.id} {block.width} {self.shape.sequence}"
        cut = (layout.tensor, layout.pipeline, layout.context, layout.experts, layout.recomputation)
        network = (machines.network or 0.0) * 8e-9 / machines.devices_per_node
        sizes = {
            "node": machines.devices_per_node,
            "rack": max(USUAL["rack"], machines.devices_per_node),
            "devices": machines.devices,
            "speed": network if machines.nodes > 1 else USUAL["speed"],
            "parameters": self.shape.parameters(),
            "sequence": self.shape.sequence,
        }
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
            "run": (),
            "experts-run": (),
            **dict.fromkeys(OWN[:2] + EXPERTS[:2], ()),
            self.own[0]: (model,),
            self.own[1]: (" ".join(map(str, (model, layout.precision, layout.microbatch, *cut))),),
            **{name: tuple(_steps(value / USUAL[name])) for name, value in sizes.items()},
        }

    def time(self, rates: Mapping[str, float]) -> StepTime:
        """Return the time of a step at rates."""
        return step_time(self.work, self.machines, self.layout, self.traits, rates)

    def keys(self, rate: str, prior: Prior) -> Iterator[Key]:
        """Yield the effects whose sum a rate's logarithm is."""
        return ((rate, level, name) for level in prior.spread for name in self.names[level])


def _steps(ratio: float) -> Iterator[str]:
    """Yield a name for each doubling, or halving, of a size."""
    count = round(math.log2(ratio)) if ratio > 0 else 0
    return (f"{'+' if count > 0 else '-'}{step}" for step in range(1, abs(count) + 1))


@dataclass(frozen=True)
class Run:
    """A training that ran, and the seconds that its step took."""

    subject: Subject
    seconds: float


@dataclass(frozen=True)
class Basis:
    """What a prediction rests on."""

    software: Software
    known: Calibration
    runs: tuple[Run, ...] = ()
    """Trainings that ran, from which it learns."""


def basis(software: str, runs: Iterable[Run] = ()) -> Basis:
    """Return a generation of software as it was fitted; raises InputError where there is none."""
    return Basis(calibration().of(software), calibration(), tuple(runs))


def rates_of(subject: Subject, known: Calibration) -> dict[str, float]:
    """Return the fitted rates of a subject."""
    return {
        rate: known.rate[rate].middle
        * math.exp(sum(known.effect(key).mean for key in subject.keys(rate, known.rate[rate])))
        for rate in IDEAL
    }


def weights_of(subject: Subject, known: Calibration) -> dict[Key, float]:
    """Return how much each effect moves the time of a subject: derivatives of its logarithm."""
    rates, found = rates_of(subject, known), dict[Key, float]()
    for rate, slope in (*slopes(subject, rates).items(), (TIME, 1.0)):
        if slope:
            found |= dict.fromkeys(subject.keys(rate, known.rate[rate]), slope)
    return found


def slopes(subject: Subject, rates: Mapping[str, float]) -> dict[str, float]:
    """Return the derivative of the logarithm of a step's time by that of each rate."""
    now = math.log(subject.time(rates).seconds)
    return {
        rate: (math.log(subject.time({**rates, rate: value * math.exp(STEP)}).seconds) - now) / STEP
        for rate, value in rates.items()
    }


def covariance(one: Mapping[Key, float], other: Mapping[Key, float], known: Calibration) -> float:
    """Return the covariance of two times, as logarithms, given by how much each effect moves them."""
    both = one.keys() & other.keys()
    shared = sum(one[key] * other[key] * known.effect(key).spread ** 2 for key in both)
    return shared - sum(a * b for a, b in zip(_narrowed(one, known), _narrowed(other, known), strict=False))


def _narrowed(weights: Mapping[Key, float], known: Calibration) -> list[float]:
    """Return how much of a time's deviation rows took away, by direction."""
    found: list[float] = []
    for key, weight in weights.items():
        effect = known.effect(key)
        found += [0.0] * (len(effect.directions) - len(found))
        for index, direction in enumerate(effect.directions):
            found[index] += weight * effect.spread * direction
    return found


@dataclass(frozen=True)
class Told:
    """What is known of a time that is asked about."""

    time: StepTime
    """By the fitted rates alone."""
    shift: float
    """What is added to its logarithm, by runs too."""
    spread: float
    """Deviation of the logarithm."""
    before: float
    """The same without the runs."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.time.seconds * math.exp(self.shift)

    @property
    def half(self) -> float:
        """Half of the 90 % interval, as a logarithm."""
        return NINETY * self.spread


def told(subject: Subject, basis: Basis) -> Told:
    """Return the time of a step, and what runs change of it: a linear Gaussian update."""
    known, runs = basis.known, basis.runs
    every = [*(run.subject for run in runs), subject]
    weights = [weights_of(one, known) for one in every]
    times = [one.time(rates_of(one, known)) for one in every]
    # Covariances of all of them, and by how much runs were slower than expected.
    table = [[covariance(one, other, known) for other in weights] for one in weights]
    for index, one in enumerate(every):
        table[index][index] += known.effect((TIME, one.own[2], UNSEEN)).spread ** 2
    slower = [
        math.log(run.seconds / time.seconds) - _shift(run.subject, known)
        for run, time in zip(runs, times, strict=False)
    ]
    slower, before = [*slower, 0.0], math.sqrt(table[-1][-1])
    # What each run says is taken out of the others; what is left of the subject is what none says.
    for pivot in range(len(runs)):
        for index in range(pivot + 1, len(every)):
            share = table[index][pivot] / table[pivot][pivot]
            slower[index] -= share * slower[pivot]
            table[index] = [a - share * b for a, b in zip(table[index], table[pivot], strict=True)]
    shift, alone = _shift(subject, known) - slower[-1], known.effect((TIME, subject.own[2], UNSEEN)).spread
    return Told(times[-1], shift, max(alone, math.sqrt(max(0.0, table[-1][-1]))), before)


def _shift(subject: Subject, known: Calibration) -> float:
    """Return what is fitted of the logarithm of the time itself."""
    return sum(known.effect(key).mean for key in subject.keys(TIME, known.rate[TIME]))
