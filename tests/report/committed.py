"""Judged records, and changes of them, for tests of what is shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tests.records import PROJECT, training_record
from twinrun.results.judged import Judged
from twinrun.results.verdicts import Outcome, Verdict

ROOT = Path(__file__).resolve().parents[2]
__all__ = ["PROJECT", "ROOT", "changed", "judged", "newest", "restated", "verdict"]


def newest(recipe: str) -> Judged:
    """Return a record of a training on two H200."""
    settings = ("model=mpt-7b",) if recipe == "mpt7b-scaling" else ()
    rates = {"devices=1": 500.0, "devices=2": 495.0}
    return training_record(rates, recipe=recipe, gpu="h200", scale="node", settings=settings, spread=0.01)


def changed(found: Judged, **fields: Any) -> Judged:
    """Return the record with other fields."""
    return dataclasses.replace(found, **fields)


def judged(found: Judged, *outcomes: Outcome) -> Judged:
    """Return the record with a verdict for each of `outcomes`."""
    return changed(found, verdicts=tuple(map(verdict, outcomes)))


def verdict(outcome: Outcome, **fields: Any) -> Verdict:
    """Return a verdict on a ratio of two points."""
    known: dict[str, Any] = {"claim": "a-claim", "statement": "It keeps its speed", "reason": ""}
    known |= {"published": 0.958, "measured": None, "metric": "tokens-per-second", "title": "tokens/s"}
    return Verdict(outcome=outcome, **(known | {"unit": "ratio", "per": "device"} | fields))


def restated(outcome: Outcome) -> Verdict:
    """Return a restatement that was judged."""
    said: dict[str, Any] = {"statement": "It trains at 46 % of the peak", "reason": "it is so"}
    said |= {"published": 45.86, "metric": "model-flops-share", "title": "MFU", "unit": "%"}
    return verdict(outcome, measured=None if outcome == "not-comparable" else 50.0, **said)
