"""Whether, where and how often a run saves, and from what it goes on: `--checkpoint`, `--leg`, `--from`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from twinrun.checkpoints import store_at
from twinrun.checkpoints.s3 import is_remote
from twinrun.checkpoints.store import MANIFEST
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
    if asked.place and not is_remote(asked.place, option=f"{OPTION} place"):
        raise InputError(
            "--checkpoint place takes only s3:// URLs",
            place=f"{OPTION} place",
            found=asked.place,
            allowed="s3://...",
        )
    source = source or asked.source
    if source and not is_remote(source, option=FROM):
        source = str(Path(source).absolute())
    return asked.model_copy(update={"source": source})


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
            allowed=f"the run folder of leg {first.number - 1}, or s3://..." if first else None,
        )
    if source and not lacking:
        raise InputError(
            "nothing here goes on from another run",
            place=FROM,
            found=source,
            allowed="with --leg 2 or a later one",
            hint="`--checkpoint source=...` is for a run without legs",
        )


def source_folder(asked: Checkpointing | None) -> Path | None:
    """Return the folder of another run that the ranks go on from; None for none, or one in a store."""
    return Path(asked.source) if asked and asked.source and not is_remote(asked.source) else None


def reaches_store(asked: Checkpointing | None) -> bool:
    """Say whether ranks with these checkpoints talk to an object store."""
    return asked is not None and any(is_remote(one) for one in (asked.place, asked.source) if one)


def _place_of(asked: Checkpointing, point: str) -> str | None:
    """Return where a point saves, None where no place was asked for."""
    return f"{asked.place.rstrip('/')}/{point}" if asked.place else None


def checkpoints_of_point(
    asked: Checkpointing | None,
    *,
    point: str,
    continued: LegSteps | None,
    known: Collection[str],
    folder: Path,
    inside: Callable[[Path], str],
) -> Checkpointing | None:
    """Return where one point saves and goes on from.

    Args:
        known: points of the run, a leg goes on from one of them or from the source that was asked for.
        folder: of the run's checkpoints, where no other place is asked for.
        inside: says how the ranks see a folder.
    """
    if asked is None:
        return None

    def place_of(name: str) -> str:
        return _place_of(asked, name) or inside(folder / name)

    if continued and continued.previous is not None and continued.previous in known:
        source: str | None = place_of(continued.previous)
    else:
        source = _left_by_another(asked.source, continued, inside)
    begin = continued.begin if continued else None
    return asked.model_copy(update={"place": place_of(point), "source": source, "begin": begin})


def _left_by_another(
    source: str | None, continued: LegSteps | None, inside: Callable[[Path], str]
) -> str | None:
    """Return the place of another run's checkpoints as the ranks see it; the first leg needs none."""
    if source is None or (continued and continued.previous is None):
        return None
    place = inside_of(source, continued) if continued else source
    return place if is_remote(place) else inside(Path(place))


def inside_of(source: str, continued: LegSteps) -> str:
    """Return the place of the leg before inside a run folder, a place of several points, or as it is."""
    base = source.rstrip("/")
    for place in (f"{base}/checkpoints/{continued.previous}", f"{base}/{continued.previous}"):
        if store_at(place).steps():
            return place
    return base


def check_legs(asked: Checkpointing | None, *, plan: Plan, resume: bool) -> None:
    """Hold the legs of a plan against what lies at their places, before anything is started.

    Raises:
        InputError: the leg was run before, or what it should go on from is no checkpoint, of another run, or
            after another step.
    """
    described = plan.description
    for point in plan.points:
        leg = described.points[point.id].leg
        if asked is None or leg is None:
            continue
        place = _place_of(asked, point.id)
        if place and not resume and (steps := store_at(place).steps()):
            raise InputError(
                f"leg {leg.number} was run before; nothing is overwritten",
                place=place,
                found=f"a checkpoint after step {steps[-1]}",
                allowed="an empty place",
                hint="choose another place, run the leg after it, or go on with --resume",
            )
        if leg.previous and leg.previous not in {one.id for one in plan.points} and asked.source:
            _check_continuation(inside_of(asked.source, leg), leg, described.identity)


def demand_signatures(
    root: Path, asked: Checkpointing | None, *, plan: Plan, run: Path, signed: bool
) -> None:
    """Hold the checkpoints that a run goes on from against their signatures, where those are demanded.

    Args:
        run: folder of the run, in which its points save where no other place is asked for.
        signed: an option demands them; the file of signers may too.

    Raises:
        InputError: no known signer has signed the newest of a place, or the one that a leg goes on from.
    """
    if not is_demanded(root, asked=signed) or asked is None:
        if signed:
            raise InputError("nothing here goes on from a checkpoint", place="--require-signature")
        return
    known = {one.id for one in plan.points}
    for point in plan.points:
        own = _place_of(asked, point.id) or str(run / "checkpoints" / point.id)
        demand_signed_checkpoint(store_at(own), step=None, root=root)
        leg = plan.description.points[point.id].leg
        if asked.source and not (leg and (leg.previous is None or leg.previous in known)):
            place = inside_of(asked.source, leg) if leg else asked.source
            demand_signed_checkpoint(store_at(place), step=leg.begin if leg else None, root=root)


def _check_continuation(source: str, leg: LegSteps, identity: Mapping[str, str]) -> None:
    store = store_at(source)
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
