from __future__ import annotations

import pytest

from twinrun.foundation.errors import InputError, closest


def test_all_parts_are_told_in_order() -> None:
    place, allowed = "recipe.toml:name", ("mpt-1b", "mpt-3b")
    error = InputError("no such name", place=place, found="mpt-2b", allowed=allowed, hint="pick one")
    assert str(error).splitlines() == [
        "error: recipe.toml:name: no such name",
        "  found: mpt-2b",
        "  allowed: mpt-1b, mpt-3b",
        "hint: pick one",
    ]


NAMES = ("mpt-1b", "node", "h200", "h100-80gb", "optimizer.learning_rate")


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("h100", "h100-80gb"),
        ("h20", "h200"),
        ("lr", "optimizer.learning_rate"),
        ("mpt-1", "mpt-1b"),
        ("nodes", "node"),
        ("zzz", None),
        ("", None),
    ],
)
def test_a_near_name_is_hinted_and_a_far_one_is_not(word: str, nearest: str | None) -> None:
    assert closest(word, iter(NAMES)) == (f"did you mean `{nearest}`?" if nearest else None)


@pytest.mark.parametrize(("found", "shown"), [(0, "0"), (False, "False"), ("", ""), ([], "(none)")])
def test_a_found_value_that_is_false_is_still_told(found: object, shown: str) -> None:
    assert f"  found: {shown}" in str(InputError("not allowed", found=found)).splitlines()
