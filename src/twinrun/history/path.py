"""Two ends, and the way from the good one to the bad one in steps that each leave what installs."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from pathlib import Path

from packaging.version import Version
from pydantic import Field

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen
from twinrun.images.resolution import compile_requirements, compiled_text, declared_metadata
from twinrun.manifests.locks import PythonLock, parse_python_lock
from twinrun.manifests.stack import Stack, matches, normalise
from twinrun.planning.project import Project
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record

STACKS, LOCK = "images/stacks", "requirements.lock"
Packages = dict[str, PythonLock]
"""Locked entries by the name of their package; one that has a version for each marker has several."""


class BisectSide(Frozen):
    """One end of a bisection."""

    label: str
    """Name that the user gave it."""
    stack: str | None = None
    """Folder of images/stacks; null for a lock file, which takes that of the recipe."""
    packages: Packages
    lifted: frozenset[str] = frozenset()
    """Packages whose declared bounds the stack lifts."""
    beside: dict[str, str] = Field(default_factory=dict)
    """What a lock does not hold, by its name: of a stack its image, of a record also its commit and more."""


def side_of(project: Project, text: str) -> BisectSide:
    """Return the end that `text` names.

    Raises:
        InputError: it is no stack, lock file or record, or the record's lock is not to be had.
    """
    place = Path(text)
    if place.suffix == ".lock" and place.is_file():
        return BisectSide(label=text, packages=_packages(place.read_text(encoding="utf-8"), text))
    if place.suffix == ".json" or (place / "record.json").is_file():
        return side_of_record(project, read_record(place, project), text)
    known = sorted(path.parent.name for path in (project.root / STACKS).glob("*/stack.toml"))
    if text not in known:
        allowed = [*known, "a file requirements.lock", "a record"]
        raise InputError("no stack, lock or record", place=text or "an end", allowed=allowed)
    stack = project.stack(text)
    return BisectSide(
        label=text,
        stack=text,
        packages=_packages(stack.lock(project.root).read_text(encoding="utf-8"), text),
        lifted=frozenset(normalise(one.package()) for one in stack.stack.lifted),
        beside={"base image, system packages and interpreter": text},
    )


def side_of_record(project: Project, record: Judged, text: str) -> BisectSide:
    """Return a record as an end; raises InputError where its lock is not to be had."""
    name, commit = record.plan.stack, record.record.revision.commit or "unknown"
    file, variables = f"{STACKS}/{name}/{LOCK}", sorted(record.environment.variables.items())
    own = {
        "commit": commit,
        "driver": record.node.driver or "none",
        "variables": " ".join(f"{key}={value}" for key, value in variables) or "none",
    }
    if (project.root / STACKS / name / "stack.toml").is_file():
        now = side_of(project, name)
        if project.stack(name).lock_sha256 == record.plan.lock_sha256:
            return now.model_copy(update={"label": text, "beside": now.beside | own})
    show = ["git", "-C", str(project.root), "show", f"{commit}:{file}"]
    done = subprocess.run(show, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(
            "the lock of the record is not to be had",
            place=text,
            found=f"{file} of commit {commit}",
            allowed="a record whose commit this checkout has, or whose lock is that of the stack now",
            hint="git fetch brings the history of the project, or name the lock file itself",
        )
    return BisectSide(label=text, stack=name, packages=_packages(done.stdout, text), beside=own)


def _packages(text: str, place: str) -> Packages:
    found: Packages = {}
    for pin, hashes in parse_python_lock(text, place=place).items():
        found.setdefault(normalise(pin.partition("==")[0]), {})[pin] = hashes
    if not found:
        raise InputError("no package is locked there", place=place, found="no pin", allowed="a hashed lock")
    return found


def versions(entries: PythonLock) -> str:
    """Return the versions of one package in words."""
    found = dict.fromkeys(pin.partition("==")[2].partition(" ")[0] for pin in entries)
    return " or ".join(found) or "absent"


Requirers = dict[str, frozenset[str]]
"""By package the names of those that require it."""
Resolves = Callable[[Packages], Requirers | None]
"""Returns who requires each package, None where a resolver takes more or fewer packages than are given."""
# A question takes the resolver a second, and a path between two stacks of a year has sixty packages.
MOST_QUESTIONS = 48
# Packages that the name of a step has.
NAMED = 6


class ChangeStep(Frozen):
    """Packages that change at once."""

    label: str
    """For example `torch 2.7.0 -> 2.7.1`."""
    packages: Packages
    """Entries of the bad end; a package without entries is removed."""

    def applied(self, state: Packages) -> Packages:
        """Return the packages after this step."""
        return {name: one for name, one in (state | self.packages).items() if one}


class ChangePath(Frozen):
    """The steps from the good end to the bad one."""

    start: Packages
    steps: tuple[ChangeStep, ...]
    fixed: tuple[str, ...] = ()
    """Differences of the ends that no step can bring, such as the driver."""

    def state(self, steps: Iterable[int]) -> Packages:
        """Return the good end with some steps, counted from 1, applied in their order."""
        return reduce(lambda state, step: self.steps[step - 1].applied(state), sorted(steps), self.start)


def digest_of(state: Packages) -> str:
    """Return the digest that names a state."""
    locked = {pin: sorted(hashes) for one in state.values() for pin, hashes in one.items()}
    return sha256_of_bytes(canonical_json(locked).encode())[:12]


def path_between(good: BisectSide, bad: BisectSide, *, resolves: Resolves) -> ChangePath:
    """Order what differs between two ends.

    Raises:
        InputError: nothing differs that a step could bring.
        MachineError: the resolver does not take an end itself.
    """
    if good.packages == bad.packages:
        raise InputError("nothing differs between the two ends", place="--good and --bad", found=good.label)
    ends = []
    for side in (good, bad):
        if (requirers := resolves(side.packages)) is None:
            raise MachineError(
                "the resolver does not take the lock of an end as it stands",
                place=side.label,
                found="another set of packages, or no answer of the index",
                hint="check the network; `invoke lock --check` says whether the lock is stale",
            )
        ends.append(requirers)
    steps = _ordered(_units(good, bad, ends), good.packages, bad.packages, resolves)
    return ChangePath(start=good.packages, steps=tuple(steps), fixed=tuple(_fixed(good, bad)))


def at_once(a: BisectSide, b: BisectSide) -> ChangePath:
    """Return everything that differs as one step, which nothing has to resolve halfway."""
    changed = [name for unit in _units(a, b, ()) for name in unit]
    steps = (_step(changed, a.packages, b.packages),)
    return ChangePath(start=a.packages, steps=steps, fixed=tuple(_fixed(a, b)))


def _fixed(good: BisectSide, bad: BisectSide) -> Iterable[str]:
    """Yield what differs beside the packages, where both ends say it."""
    for name in sorted(good.beside.keys() & bad.beside.keys()):
        if good.beside[name] != bad.beside[name]:
            yield f"{name}: {good.beside[name]} -> {bad.beside[name]}; the runs have the first"


def _units(good: BisectSide, bad: BisectSide, ends: Sequence[Requirers]) -> list[list[str]]:
    """Return the changed packages; one that comes or goes is with the changed packages that require it.

    Packages whose declared bounds a stack lifts are one unit: the resolver holds none of them to the others.
    """
    before, after = good.packages, bad.packages
    unit = {name: {name} for name in before.keys() | after.keys() if before.get(name) != after.get(name)}

    def join(names: Iterable[str]) -> None:
        joined = set().union(*(unit[name] for name in names if name in unit))
        unit.update(dict.fromkeys(joined, joined))

    join(good.lifted)
    join(bad.lifted)
    for name in sorted(unit):
        if name not in before or name not in after:
            join({name}.union(*(end.get(name, ()) for end in ends)))
    return sorted({min(one): sorted(one) for one in unit.values()}.values())


def _ordered(
    units: Sequence[list[str]], good: Packages, bad: Packages, resolves: Resolves
) -> list[ChangeStep]:
    """Order the units so that every prefix resolves; what resolves only together is one step.

    After `MOST_QUESTIONS` the rest is one step: the last prefix is the bad end, which resolves.
    """
    waiting, state, steps, asked = list(units), good, list[ChangeStep](), itertools.count()

    def step_of(some: Sequence[list[str]]) -> ChangeStep:
        return _step([name for unit in some for name in unit], good, bad)

    def fits(some: Sequence[list[str]]) -> bool:
        return next(asked) < MOST_QUESTIONS and resolves(step_of(some).applied(state)) is not None

    while waiting:
        # A pass over all: what waits for another package is not asked for again after each step.
        before = len(waiting)
        for unit in list(waiting):
            if len(waiting) == 1 or fits([unit]):
                steps.append(step_of([unit]))
                state = steps[-1].applied(state)
                waiting.remove(unit)
        if len(waiting) == before:
            group = _together(waiting, fits)
            steps.append(step_of(group))
            state = steps[-1].applied(state)
            waiting = [unit for unit in waiting if unit not in group]
    return steps


def _step(names: Sequence[str], good: Packages, bad: Packages) -> ChangeStep:
    # Those that both ends have say most of what the step is.
    order = sorted(names, key=lambda name: (name not in good or name not in bad, name))
    moves = [f"{name} {versions(good.get(name, {}))} -> {versions(bad.get(name, {}))}" for name in order]
    more = f" and {len(moves) - NAMED} that come or go with it" if len(moves) > NAMED else ""
    packages = {name: bad.get(name, {}) for name in names}
    return ChangeStep(label=", ".join(moves[:NAMED]) + more, packages=packages)


def _together(waiting: Sequence[list[str]], fits: Callable[[Sequence[list[str]]], bool]) -> list[list[str]]:
    """Return few units that resolve together: the whole, which is the bad end, without what can be spared."""
    group = list(waiting)
    size = len(group) // 2
    while size:
        for start in range(0, len(group), size):
            rest = [*group[:start], *group[start + size :]]
            if rest and fits(rest):
                group = rest
                break
        else:
            size //= 2
    return group


def resolver(python: str, *stacks: Stack) -> Resolves:
    """Return what asks uv whether packages fit together under the interpreters `python`.

    What a stack declares of a package counts where that version is among the packages. Wheels of the
    framework's own index are asked for by their public version, whose requirements they share; what they
    bring in place of other packages is left out, as `invoke lock` leaves it out.
    """

    def resolves(packages: Packages) -> Requirers | None:
        pins = {_public(pin) for entries in packages.values() for pin in entries}
        exact = {normalise(pin.partition(" ")[0]) for pin in pins}
        source = [one for stack in stacks for one in stack.source if normalise(one.requirement) in exact]
        reduced = [one for stack in stacks for one in stack.reduced if normalise(one.requirement) in exact]
        lifted = [one.requirement for stack in stacks for one in stack.lifted]
        built = [word for one in source for word in ("--no-binary", one.package())]
        try:
            text = compiled_text(
                "\n".join(sorted(pins)),
                ["--python-version", python, *built],
                project=declared_metadata(tuple(dict.fromkeys([*source, *reduced]))),
                overrides=sorted({one for one in lifted if normalise(one) in exact}),
            )
        except MachineError:
            return None
        found = _requirers(text)
        replaced = tuple(pattern for stack in stacks for pattern in stack.replaces)
        fits = {name for name in found if not matches(name, replaced)} <= packages.keys()
        return found if fits else None

    return resolves


def _requirers(text: str) -> Requirers:
    """Return who requires each package, of a lock with uv's comments."""
    found: dict[str, set[str]] = {}
    here: set[str] = set()
    for line in text.splitlines():
        if line[:1].isalnum():
            here = found.setdefault(normalise(line.partition("==")[0]), set())
        elif line.lstrip().startswith("#"):
            here.add(normalise(line.lstrip(" #").removeprefix("via").strip()))
    return {name: frozenset(ones) for name, ones in found.items()}


def _public(pin: str) -> str:
    requirement, _, marker = pin.partition(" ")
    return f"{requirement.partition('+')[0]} {marker}".strip()


def between(step: ChangeStep, state: Packages, *, python: str) -> tuple[ChangeStep, ...]:
    """Return the finer steps of one: the versions of its package that the index has.

    Empty where a step changes several packages, has nothing inside, or the index cannot be asked. Hashes
    are the index's.
    """
    if len(step.packages) != 1:
        return ()
    ((name, after),) = step.packages.items()
    before = state.get(name, {})
    if len(before) != 1 or len(after) != 1:
        return ()
    first, last = (Version(_public(versions(one))) for one in (before, after))
    low, high = sorted((first, last))
    inner: list[PythonLock] = []
    with contextlib.suppress(MachineError):
        options = ["--python-version", python, "--no-deps"]
        while newest := compile_requirements(f"{name}>{low},<{high}", options):
            inner.append(newest)
            high = Version(versions(newest))
    ways = [before, *(inner[::-1] if first < last else inner), after]
    steps = [
        ChangeStep(label=f"{name} {versions(one)} -> {versions(two)}", packages={name: two})
        for one, two in itertools.pairwise(ways)
    ]
    return tuple(steps) if inner else ()
