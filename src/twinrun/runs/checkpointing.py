"""Whether, where and how often a run saves, and from what it goes on: `--checkpoint`, `--leg`, `--from`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from twinrun.checkpoints.folder import MANIFEST, FolderStore
from twinrun.checkpoints.verification import demand_same_run, demand_signed_checkpoint, read_manifest
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import validate
from twinrun.foundation.signatures import is_demanded
from twinrun.planning.plan import Plan
from twinrun.protocol.job import Checkpointing
from twinrun.protocol.model_source import in_words
from twinrun.workloads.workload import LegSteps, Workload

OPTION, FROM = "--checkpoint", "--from"


def checkpointing_of(
    texts: Sequence[str], *, workload: Workload, plan: Plan, source: str | None = None
) -> Checkpointing | None:
    """Return what the options ask for, or None where nothing is saved; a run in legs saves at their ends.

    Args:
        texts: each a `key=value` of Checkpointing.
        source: where the leg before the one that is run has left its checkpoint.

    Raises:
        InputError: it is no such key or value, or this workload, engine or leg cannot do it.
    """
    described = plan.description
    points = described.points
    found = [one for point in plan.points if (one := points[point.id].leg)]
    _check_source(plan, found, source)
    if not texts and not found:
        return None
    if not workload.saves:
        raise InputError("a run of this kind is not saved", place=OPTION, found=f"[{plan.workload}]")
    if described.model:
        raise InputError(
            "nothing is trained, so nothing is saved", place=OPTION, found=in_words(described.model)
        )
    for point in plan.points:
        if without := points[point.id].unsaved:
            raise InputError(
                "no checkpoint is made of this layout",
                place=f"{OPTION} {point.id}",
                found=without,
                allowed="layouts of data parallelism and ZeRO",
                hint="choose layouts with --set layouts=..., or leave --checkpoint out",
            )
    values: dict[str, object] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or key in values or key == "begin":
            raise InputError("not one key=value each", place=OPTION, found=text, hint="for example steps=20")
        values[key] = int(value) if value.isdecimal() else value
    if found:
        values = {"steps": max(one.end for one in found), "mode": "bounded"} | values
    asked = validate(values, Checkpointing, place=OPTION)
    source = source or asked.source
    for option, named in ((f"{OPTION} place", asked.place), (FROM, source)):
        if named and "://" in named:
            hint = "mount the bucket, or copy it to a folder"
            raise InputError("no folder", place=option, found=named, allowed="a folder", hint=hint)
    place = str(Path(asked.place).absolute()) if asked.place else ""
    return asked.model_copy(
        update={"place": place, "source": str(Path(source).absolute()) if source else None}
    )


def _check_source(plan: Plan, legs: Sequence[LegSteps], source: str | None) -> None:
    """Refuse a later leg that has nothing to go on from, and a source that nothing goes on from."""
    first = legs[0] if legs else None
    known = {point.id for point in plan.points}
    lacking = first and first.previous and first.previous not in known
    if lacking and not source:
        raise InputError(
            f"leg {first.number} goes on after step {first.begin}" if first else "",
            place=FROM,
            found="nothing to go on from",
            allowed=f"the run folder of leg {first.number - 1}" if first else None,
        )
    if source and not lacking:
        raise InputError(
            "nothing here goes on from another run",
            place=FROM,
            found=source,
            allowed="with --leg 2 or a later one",
            hint="`--checkpoint source=...` is for a run without legs",
        )


class PointCheckpoints(NamedTuple):
    """Where a point saves and what it goes on from, as this machine sees both."""

    place: str
    source: str | None = None
    begin: int | None = None
    """Step that the point goes on after."""

    def seen(self, asked: Checkpointing, inside: Callable[[Path], str]) -> Checkpointing:
        """Return what the ranks are told, who see a folder as `inside` says."""
        place, source = (one and inside(Path(one)) for one in self[:2])
        return asked.model_copy(update={"place": place, "source": source, "begin": self.begin})


def resolved(
    asked: Checkpointing | None, plan: Plan, *, run: Path, resume: bool
) -> dict[str, PointCheckpoints]:
    """Return the checkpoints of each point, once what lies at their places was held against the plan.

    Args:
        run: folder of the run, in which points save where no other place is asked for.

    Raises:
        InputError: a leg was run before, or what it should go on from is no checkpoint, of another run, or
            after another step.
    """
    if asked is None:
        return {}
    if asked.source and not Path(asked.source).is_dir():
        raise InputError("no such folder", place=FROM, found=asked.source, hint="name a run folder")
    if asked.place and not Path(asked.place).is_dir():
        raise InputError("no such folder", place=f"{OPTION} place", found=asked.place, hint="make it first")
    found, known = dict[str, PointCheckpoints](), {point.id for point in plan.points}
    for point in plan.points:
        leg, source = plan.description.points[point.id].leg, asked.source
        place = (
            f"{asked.place.rstrip('/')}/{point.id}" if asked.place else str(run / "checkpoints" / point.id)
        )
        if leg and asked.place and not resume and (steps := FolderStore(Path(place)).steps()):
            raise InputError(
                f"leg {leg.number} was run before; nothing is overwritten",
                place=place,
                found=f"a checkpoint after step {steps[-1]}",
                allowed="an empty place",
                hint="choose another place, run the leg after it, or go on with --resume",
            )
        if leg and leg.previous is None:
            source = None
        elif leg and leg.previous in known:
            source = found[leg.previous].place
        elif leg and source:
            source = _inside_of(source, leg)
            _check_continuation(source, leg, plan.description.identity)
        found[point.id] = PointCheckpoints(place, source, leg.begin if leg else None)
    return found


def _inside_of(source: str, leg: LegSteps) -> str:
    """Return the place of the leg before inside a run folder, a place of several points, or as it is."""
    base = source.rstrip("/")
    places = (f"{base}/checkpoints/{leg.previous}", f"{base}/{leg.previous}")
    return next((place for place in places if FolderStore(Path(place)).steps()), base)


def demand_signatures(
    root: Path, asked: Checkpointing | None, found: Mapping[str, PointCheckpoints], *, signed: bool
) -> None:
    """Hold the checkpoints that a run goes on from against their signatures, where those are demanded.

    Args:
        signed: an option demands them; the file of signers may too.

    Raises:
        InputError: no known signer has signed the newest of a place, or the one that a leg goes on from.
    """
    if not is_demanded(root, asked=signed) or asked is None:
        if signed:
            raise InputError("nothing here goes on from a checkpoint", place="--require-signature")
        return
    own = {one.place for one in found.values()}
    for one in found.values():
        demand_signed_checkpoint(FolderStore(Path(one.place)), step=None, root=root)
        if one.source and one.source not in own:
            demand_signed_checkpoint(FolderStore(Path(one.source)), step=one.begin, root=root)


def _check_continuation(source: str, leg: LegSteps, identity: Mapping[str, str]) -> None:
    store = FolderStore(Path(source))
    steps = store.steps()
    if leg.begin not in steps:
        raise InputError(
            f"leg {leg.number} goes on after step {leg.begin}" if steps else "no checkpoint here",
            place=source,
            found=f"checkpoints after step {', '.join(map(str, steps))}" if steps else "no folder `step-...`",
            allowed=f"one after step {leg.begin}, where leg {leg.number - 1} ends",
        )
    manifest = read_manifest(store, leg.begin)
    # Data and tokenizer are the ranks' to compare: here they may not be prepared yet.
    theirs = {name: manifest.identity.get(name, "nothing") for name in identity}
    theirs |= {name: value for name, value in manifest.identity.items() if "." in name}
    place = store.file(leg.begin, MANIFEST)
    demand_same_run(theirs, identity, "the checkpoint is of another run", place=place)
