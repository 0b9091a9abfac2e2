"""The way from the good end to the bad one: steps, each of which leaves an environment that installs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from pathlib import Path

from packaging.version import InvalidVersion, Version
from pydantic import Field

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen
from twinrun.history.sides import BisectSide, Packages, git, versions
from twinrun.images.resolution import compile_requirements, compiled_text, declared_metadata
from twinrun.manifests.locks import PythonLock
from twinrun.manifests.stack import Stack, matches, normalise

Requirers = dict[str, frozenset[str]]
"""By package the names of those that require it."""
Resolves = Callable[[Packages], Requirers | None]
"""Returns who requires each package, None where a resolver takes more or fewer packages than are given."""
# A question takes the resolver a second, and a path between two stacks of a year has sixty packages.
MOST_QUESTIONS = 48
# Packages that the name of a step has.
NAMED = 6


class RunState(Frozen):
    """All that a run of some position depends on."""

    packages: Packages
    commit: str | None = None
    variables: dict[str, str] | None = None

    def digest(self) -> str:
        """Return the digest that names the state."""
        locked = {pin: sorted(hashes) for one in self.packages.values() for pin, hashes in one.items()}
        return sha256_of_bytes(canonical_json([locked, self.commit, self.variables]).encode())[:12]


class ChangeStep(Frozen):
    """What changes at once."""

    label: str
    """For example `torch 2.7.0 -> 2.7.1`."""
    packages: Packages = Field(default_factory=dict)
    """Entries of the bad end; a package without entries is removed."""
    commit: str | None = None
    variable: tuple[str, str | None] | None = None
    """Name and value of the bad end, None where that does not set it."""

    def applied(self, state: RunState) -> RunState:
        """Return the state after this step."""
        packages = {name: one for name, one in (state.packages | self.packages).items() if one}
        variables = state.variables
        if self.variable:
            name, value = self.variable
            variables = {key: one for key, one in (variables or {}).items() if key != name}
            variables |= {} if value is None else {name: value}
        return RunState(packages=packages, commit=self.commit or state.commit, variables=variables)


class ChangePath(Frozen):
    """The steps from the good end to the bad one."""

    start: RunState
    steps: tuple[ChangeStep, ...]
    fixed: tuple[str, ...] = ()
    """Differences of the ends that no step can bring, such as the driver."""

    def state(self, steps: Iterable[int]) -> RunState:
        """Return the good end with some steps, counted from 1, applied in their order."""
        return reduce(lambda state, step: self.steps[step - 1].applied(state), sorted(steps), self.start)

    def prefix(self, count: int) -> RunState:
        """Return the good end with the first `count` steps applied."""
        return self.state(range(1, count + 1))


def path_between(good: BisectSide, bad: BisectSide, *, resolves: Resolves) -> ChangePath:
    """Order what differs between two ends.

    Raises:
        InputError: nothing differs that a step could bring.
        MachineError: the resolver does not take an end itself.
    """
    found = [resolves(side.packages) for side in (good, bad)]
    for side, requirers in zip((good, bad), found, strict=True):
        if requirers is None:
            raise MachineError(
                "the resolver does not take the lock of an end as it stands",
                place=side.label,
                found="another set of packages, or no answer of the index",
                hint="check the network; `invoke lock --check` says whether the lock is stale",
            )
    units = _units(good, bad, [one for one in found if one is not None])
    wheels = _ordered(units, good.packages, bad.packages, resolves)
    others = [*_commits(good, bad), *_variables(good, bad)]
    fixed = [f"driver {good.driver} -> {bad.driver}"] if good.driver != bad.driver else []
    fixed += _system_changes(good, bad)
    if not (steps := (*wheels, *others)):
        raise InputError("nothing differs between the two ends", place="--good and --bad", found=good.label)
    start = RunState(packages=good.packages, commit=good.commit, variables=good.variables)
    return ChangePath(start=start, steps=tuple(steps), fixed=tuple(fixed))


def at_once(a: BisectSide, b: BisectSide) -> ChangePath:
    """Return everything that differs as one step, which nothing has to resolve halfway."""
    names = [
        name for name in a.packages.keys() | b.packages.keys() if a.packages.get(name) != b.packages.get(name)
    ]
    wheels = ChangeStep(label=b.label, packages={name: b.packages.get(name, {}) for name in sorted(names)})
    start = RunState(packages=a.packages, commit=a.commit, variables=a.variables)
    return ChangePath(start=start, steps=(wheels, *_commits(a, b), *_variables(a, b)))


def _system_changes(good: BisectSide, bad: BisectSide) -> list[str]:
    """Return what of the image differs, which only another image brings, and at once."""
    if not (good.stack and bad.stack) or good.stack == bad.stack:
        return []
    names = sorted(good.system.keys() | bad.system.keys())
    moves = ((name, good.system.get(name, "absent"), bad.system.get(name, "absent")) for name in names)
    changed = [f"{name} {before} -> {after}" for name, before, after in moves if before != after]
    system = [f"base image and system packages, which change as one, with the image: {', '.join(changed)}"]
    return [*(system if changed else []), f"interpreter and kernels: those of {good.stack}"]


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
    waiting, state, steps, asked = list(units), good, [], itertools.count()

    def moved(some: Sequence[list[str]]) -> Packages:
        new = {name: bad.get(name, {}) for unit in some for name in unit}
        return {name: one for name, one in (state | new).items() if one}

    def fits(some: Sequence[list[str]]) -> bool:
        return next(asked) < MOST_QUESTIONS and resolves(moved(some)) is not None

    while waiting:
        # A pass over all: what waits for another package is not asked for again after each step.
        before = len(waiting)
        for unit in list(waiting):
            if len(waiting) == 1 or fits([unit]):
                steps.append(_step(unit, good, bad))
                state = moved([unit])
                waiting.remove(unit)
        if len(waiting) == before:
            group = _together(waiting, fits)
            steps.append(_step([name for unit in group for name in unit], good, bad))
            state = moved(group)
            waiting = [unit for unit in waiting if unit not in group]
    return steps


def _step(names: Sequence[str], good: Packages, bad: Packages) -> ChangeStep:
    # Those that both ends have say most of what the step is.
    order = sorted(names, key=lambda name: (name not in good or name not in bad, name))
    moves = [f"{name} {versions(good.get(name, {}))} -> {versions(bad.get(name, {}))}" for name in order]
    more = f" and {len(moves) - NAMED} that come or go with it" if len(moves) > NAMED else ""
    return ChangeStep(
        label=", ".join(moves[:NAMED]) + more, packages={name: bad.get(name, {}) for name in names}
    )


def _together(waiting: Sequence[list[str]], fits: Callable[[Sequence[list[str]]], bool]) -> list[list[str]]:
    """Return few units that resolve together: a beginning that does, without what it can spare.

    The whole of `waiting` is the bad end, which resolves; both parts halve what is left.
    """
    low, high = 1, len(waiting)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(waiting[:middle]) else (middle, high)
    group = list(waiting[:high])
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


def _commits(good: BisectSide, bad: BisectSide) -> list[ChangeStep]:
    if bad.commit is None or good.commit == bad.commit:
        return []
    before = good.commit[:10] if good.commit else "this checkout"
    return [ChangeStep(label=f"twinrun {before} -> {bad.commit[:10]}", commit=bad.commit)]


def _variables(good: BisectSide, bad: BisectSide) -> list[ChangeStep]:
    if good.variables is None or bad.variables is None:
        return []
    before, after = good.variables, bad.variables
    return [
        ChangeStep(
            label=f"{name} {before.get(name, 'unset')} -> {after.get(name, 'unset')}",
            variable=(name, after.get(name)),
        )
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def resolver(*stacks: Stack) -> Resolves:
    """Return what asks uv whether packages fit together under the interpreters of the first stack.

    What a stack declares of a package counts where that version is among the packages. Wheels of the
    framework's own index are asked for by their public version, whose requirements they share; what they
    bring in place of other packages is left out, as `invoke lock` leaves it out.
    """
    python = ["--python-version", stacks[0].interpreter()]

    def resolves(packages: Packages) -> Requirers | None:
        pins = {_public(pin) for entries in packages.values() for pin in entries}
        exact = {normalise(pin.partition(" ")[0]) for pin in pins}
        source = [one for stack in stacks for one in stack.source if normalise(one.requirement) in exact]
        reduced = [one for stack in stacks for one in stack.reduced if normalise(one.requirement) in exact]
        lifted = [one.requirement for stack in stacks for one in stack.lifted]
        try:
            text = compiled_text(
                "\n".join(sorted(pins)),
                [*python, *(word for one in source for word in ("--no-binary", one.package()))],
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


def between(step: ChangeStep, state: RunState, *, stack: Stack, root: Path) -> tuple[ChangeStep, ...]:
    """Return the finer steps of one: the versions of its package that the index has, or our own commits.

    Empty where a step changes several packages, has nothing inside, or the index cannot be asked. Hashes
    are the index's.
    """
    if step.commit:
        listed = git(
            root, "rev-list", "--reverse", "--first-parent", f"{state.commit or 'HEAD'}..{step.commit}"
        )
        commits = (listed or "").split()
        inner = [ChangeStep(label=f"twinrun commit {one[:10]}", commit=one) for one in commits]
        return tuple(inner) if len(inner) > 1 else ()
    if len(step.packages) != 1:
        return ()
    ((name, after),) = step.packages.items()
    before = state.packages.get(name, {})
    if len(before) != 1 or len(after) != 1:
        return ()
    first, last = (Version(versions(one)) for one in (before, after))
    low, high = sorted((first, last))
    versioned = sorted((one for one in _listed(name) if low < one < high), reverse=first > last)
    steps, found = [], first
    for version in versioned:
        entries = _hashed(name, str(version), stack)
        if entries:
            steps.append(ChangeStep(label=f"{name} {found} -> {version}", packages={name: entries}))
            found = version
    return (*steps, ChangeStep(label=f"{name} {found} -> {last}", packages=step.packages)) if steps else ()


def _listed(name: str) -> list[Version]:
    """Return the final versions of a package that the index lists."""
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")
    options = ["--disable-pip-version-check", *(["--index-url", index] if index else [])]
    arguments = [sys.executable, "-m", "pip", "index", "versions", *options, name]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    line = next((one for one in done.stdout.splitlines() if one.startswith("Available versions:")), "")
    found = []
    for text in line.partition(":")[2].split(","):
        try:
            found.append(Version(text.strip()))
        except InvalidVersion:
            continue
    return [one for one in found if not one.is_prerelease]


def _hashed(name: str, version: str, stack: Stack) -> PythonLock:
    """Return the entry of one version with the hashes that the index gives; empty where it has none."""
    options = ["--python-version", stack.interpreter(), "--no-deps"]
    try:
        found = compile_requirements(f"{name}=={version}", options)
    except MachineError:
        return {}
    return {pin: hashes for pin, hashes in found.items() if hashes}
