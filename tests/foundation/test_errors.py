from __future__ import annotations

import pytest

from twinrun.foundation.errors import (
    InputError,
    closest,
)


def test_all_parts_are_told_in_order() -> None:
    error = InputError(
        "no such name",
        place="recipe.toml:name",
        found="mpt-2b",
        allowed=("mpt-1b", "mpt-3b"),
        hint="pick one",
    )
    assert str(error).splitlines() == [
        "error: recipe.toml:name: no such name",
        "  found: mpt-2b",
        "  allowed: mpt-1b, mpt-3b",
        "hint: pick one",
    ]


@pytest.mark.parametrize(
    ("word", "nearest"),
    [("h100", "h100-80gb"), ("h200", None), ("h20", "h200"), ("lr", "optimizer.learning_rate"), ("", None)],
)
def test_the_nearest_name_begins_with_the_word_that_was_typed(word: str, nearest: str | None) -> None:
    names = [name for name in ("h200", "h100-80gb", "optimizer.learning_rate") if name != word]
    said = closest(word, names) if nearest else closest(word, ["mi250"])
    assert said == (f"did you mean `{nearest}`?" if nearest else None)


@pytest.mark.parametrize(
    ("found", "shown"), [(0, "0"), (False, "False"), ("", ""), ([], "(none)"), ((), "(none)")]
)
def test_a_found_value_that_is_false_is_still_told(found: object, shown: str) -> None:
    assert f"  found: {shown}" in str(InputError("not allowed", found=found)).splitlines()


@pytest.mark.parametrize(
    ("word", "hint"), [("mpt-1", "did you mean `mpt-1b`?"), ("nodes", "did you mean `node`?"), ("zzz", None)]
)
def test_a_near_choice_is_hinted_and_a_far_one_is_not(word: str, hint: str | None) -> None:
    assert closest(word, iter(["mpt-1b", "node"])) == hint
