from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.settings import overlay, parse_settings


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("steps=8", 8),
        ("steps = 8", 8),
        ("compile=false", False),
        ("optimizer.learning_rate=3e-4", 3e-4),
        ("optimizer.betas=[0.9, 0.99]", [0.9, 0.99]),
        ("model=mpt-1b", "mpt-1b"),
        ('model="true"', "true"),
        ("devices=1,2,4", "1,2,4"),
        ("data=a=b", "a=b"),
        ("model=", ""),
    ],
)
def test_a_value_is_toml_where_it_can_be_and_else_text(text: str, value: object) -> None:
    parsed = parse_settings((text,))
    assert list(parsed.values()) == [value]
    assert type(next(iter(parsed.values()))) is type(value)


@pytest.mark.parametrize("text", ["steps", "=8", " = 8", ""])
def test_what_is_no_setting_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="expected key=value") as caught:
        parse_settings((text,))
    assert "--set model=mpt-1b" in str(caught.value)


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match="--set steps: given twice"):
        parse_settings(("steps=8", "model=mpt-1b", "steps=9"))


@given(value=st.one_of(st.integers(-(2**63), 2**63 - 1), st.booleans()))
def test_numbers_keep_their_value(value: int) -> None:
    assert parse_settings((f"key={str(value).lower()}",)) == {"key": value}


class OptimizerTable(Frozen):
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8


class SettingsTable(Frozen):
    model: str = "mpt-1b"
    steps: int = 30
    names: tuple[str, ...] = ()
    optimizer: OptimizerTable = OptimizerTable()


def laid(**user: Any) -> SettingsTable:
    return overlay(SettingsTable(), scale={}, manifest="recipe.toml", user=user)


@pytest.mark.parametrize(("key", "value"), [("steps", 8), ("optimizer.epsilon", 1e-6)])
def test_only_the_named_field_changes(key: str, value: Any) -> None:
    made = laid(**{key: value}).model_dump()
    expected = SettingsTable().model_dump()
    inner = expected["optimizer"] if "." in key else expected
    inner[key.rpartition(".")[2]] = value
    assert made == expected


def test_the_user_has_the_last_word() -> None:
    made = overlay(
        SettingsTable(), scale={"steps": 5, "model": "a"}, manifest="recipe.toml", user={"steps": 6}
    )
    assert (made.steps, made.model) == (6, "a")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("step", "steps"),
        ("optimizer.epsilo", "optimizer.epsilon"),
        ("optimizer", None),
        ("model.x", None),
        ("", None),
    ],
)
def test_a_field_that_is_not_there_is_told(key: str, hint: str | None) -> None:
    with pytest.raises(InputError, match=f"--set {re.escape(key)}: no such field") as caught:
        laid(**{key: 1})
    assert hint is None or caught.value.hint == f"did you mean `{hint}`?"
    assert "devices" in str(caught.value.allowed)


def test_a_field_of_a_scale_names_the_manifest() -> None:
    with pytest.raises(InputError, match=r"recipe\.toml:set\.step: no such field"):
        overlay(SettingsTable(), scale={"step": 1}, manifest="recipe.toml", user={})


@pytest.mark.parametrize(("text", "names"), [("one", ("one",)), ("one, two", ("one", "two"))])
def test_a_list_may_be_names_with_commas_between(text: str, names: tuple[str, ...]) -> None:
    assert laid(names=text).names == names


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(InputError, match="--set:steps"):
        laid(steps="many")
