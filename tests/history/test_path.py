"""Paths between two locks, over resolvers that are functions: every prefix resolves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from twinrun.foundation.errors import InputError, MachineError
from twinrun.history.path import MOST_QUESTIONS, BisectSide, Packages, Resolves, digest_of, path_between


def side(label: str, **pins: str) -> BisectSide:
    packages = {name: {f"{name}=={version}": frozenset({"0" * 64})} for name, version in pins.items()}
    return BisectSide(label=label, stack="small", packages=packages, beside={"driver": label})


def fits(rule: Callable[[dict[str, str]], bool]) -> Resolves:
    """Return a resolver that goes by versions, and knows of no requirer."""

    def resolves(packages: Packages) -> dict[str, frozenset[str]] | None:
        pins = {name: pin.partition("==")[2] for name, entries in packages.items() for pin in entries}
        return {} if rule(pins) else None

    return resolves


def test_what_belongs_together_is_one_step_and_the_rest_waits_for_it() -> None:
    good = side("a", alpha="1", beta="1", torch="1", triton="1")
    bad = side("b", alpha="2", beta="2", torch="2", triton="2")

    def together(found: dict[str, str]) -> bool:
        # Triton is torch's own, and the new alpha wants the new torch.
        return found["torch"] == found["triton"] and found["alpha"] <= found["torch"]

    path = path_between(good, bad, resolves=fits(together))
    labels = [step.label for step in path.steps]
    assert labels == ["beta 1 -> 2", "torch 1 -> 2, triton 1 -> 2", "alpha 1 -> 2"]
    assert path.fixed == ("driver: a -> b; the runs have the first",)
    states = [path.state(range(1, count + 1)) for count in range(len(labels) + 1)]
    assert all(fits(together)(state) is not None for state in states)
    assert states[-1] == bad.packages
    assert len({digest_of(state) for state in states}) == len(states)


def test_a_package_that_only_one_end_has_comes_or_goes() -> None:
    path = path_between(side("a", old="1"), side("a", new="1"), resolves=fits(lambda found: True))
    assert [step.label for step in path.steps] == ["new absent -> 1", "old 1 -> absent"]
    assert path.state([1, 2]).keys() == {"new"}


def test_what_comes_with_a_package_and_what_is_lifted_with_it_are_one_step() -> None:
    good, bad = (side(one, torch=one, tools=one, vision=one, **{f"cuda{one}": one}) for one in "12")
    good = good.model_copy(update={"lifted": {"torch"}})
    bad = bad.model_copy(update={"lifted": {"torch", "vision"}})
    needs = dict.fromkeys(("cuda1", "cuda2"), frozenset({"torch"}))
    path = path_between(good, bad, resolves=lambda _: needs)
    one_step = {"cuda1", "cuda2", "torch", "vision"}
    assert [step.packages.keys() for step in path.steps] == [one_step, {"tools"}]


@pytest.mark.parametrize("count", [30, 200])
def test_the_questions_to_the_resolver_are_bounded(count: int) -> None:
    """Each package waits for the one after it: the worst order for passes by name."""
    names = [f"p{number:03}" for number in range(count)]
    good, bad = (side("a", **dict.fromkeys(names, version)) for version in "12")
    asked = []

    def resolves(packages: Packages) -> dict[str, frozenset[str]] | None:
        asked.append(packages)
        new = [f"{name}==2" in packages[name] for name in names]
        return {} if new == sorted(new) else None

    path = path_between(good, bad, resolves=resolves)
    assert len(asked) <= MOST_QUESTIONS + 2
    assert path.state(range(1, len(path.steps) + 1)) == bad.packages


def test_equal_ends_and_an_end_that_does_not_resolve_are_refused() -> None:
    with pytest.raises(InputError, match="nothing differs"):
        path_between(side("a", one="1"), side("a", one="1"), resolves=fits(lambda found: True))
    with pytest.raises(MachineError, match="lock of an end"):
        path_between(side("a", one="1"), side("a", one="2"), resolves=fits(lambda found: False))
