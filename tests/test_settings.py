from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinrun.errors import InputError
from twinrun.settings import assign, parse_settings

TABLE: dict[str, Any] = {"model": "mpt-1b", "steps": 30, "optimizer": {"betas": [0.9, 0.95], "epsilon": 1e-8}}


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


@pytest.mark.parametrize(("key", "value"), [("steps", 8), ("optimizer.epsilon", 1e-6)])
def test_only_the_named_field_changes(key: str, value: object) -> None:
    table = copy.deepcopy(TABLE)
    assign(table, key, value, place="--set")
    name = key.rpartition(".")[2]
    changed = table["optimizer"] if "." in key else table
    before = TABLE["optimizer"] if "." in key else TABLE
    assert changed.pop(name) == value
    assert changed == {other: item for other, item in before.items() if other != name}


@pytest.mark.parametrize(
    "key",
    [
        "step",
        "optimizer",
        "optimizer.epsilom",
        "optimizer.",
        ".steps",
        "steps.more",
        "optimiser.epsilon",
        "a.b.c",
        "",
    ],
)
def test_a_field_that_is_not_there_is_refused_and_nothing_changes(key: str) -> None:
    table = copy.deepcopy(TABLE)
    with pytest.raises(InputError, match="recipe: no such field") as caught:
        assign(table, key, 1, place="recipe")
    assert table == TABLE
    assert caught.value.allowed == ["devices", "model", "optimizer.betas", "optimizer.epsilon", "steps"]


def test_a_near_field_is_hinted() -> None:
    with pytest.raises(InputError, match=r"did you mean `optimizer\.epsilon`"):
        assign(copy.deepcopy(TABLE), "optimizer.epsilom", 1, place="--set")


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000, "1\nmodel=2"])
def test_a_value_that_toml_cannot_take_is_text_or_refused(value: str) -> None:
    try:
        parsed = parse_settings((f"steps={value}",))
    except InputError:
        return
    assert parsed == {"steps": value}


@pytest.mark.parametrize("key", ["optimizer.betas", "names"])
def test_a_list_is_not_given_as_one_name(key: str) -> None:
    table = copy.deepcopy(TABLE) | {"names": ["a", "b"]}
    with pytest.raises(InputError, match="expected a list") as caught:
        assign(table, key, "kernels", place=f"--set {key}")
    assert f"""hint: --set '{key}=["kernels"]'""" in str(caught.value)
    assign(table, key, ["kernels"], place=f"--set {key}")
