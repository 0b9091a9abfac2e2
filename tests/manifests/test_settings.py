from __future__ import annotations

import pytest

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
def test_what_is_no_setting_or_is_given_twice_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected key=value"):
        parse_settings((text,))
    with pytest.raises(InputError, match="--set steps: given twice"):
        parse_settings(("steps=8", "model=mpt-1b", "steps=9"))


class SettingsTable(Frozen):
    model: str = "mpt-1b"
    steps: int = 30


def test_the_user_has_the_last_word() -> None:
    scale = {"steps": 5, "model": "a"}
    made = overlay(SettingsTable(), scale=scale, manifest="recipe.toml", user={"steps": 6})
    assert (made.steps, made.model) == (6, "a")
