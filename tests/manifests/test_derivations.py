"""Derivations written out in manifests."""

from __future__ import annotations

import pytest

from twinrun.manifests.restatements import MAX_LETTERS, evaluated


@pytest.mark.parametrize(
    ("text", "value"),
    [("7 - 2", 5), ("1 + 2 * 3", 7), ("(1 + 2) * 3", 9), ("3 / 4", 0.75), ("2 ** 10", 1024), ("1e3", 1000)],
)
def test_numbers_are_joined(text: str, value: float) -> None:
    assert evaluated(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 +",
        "a",
        "1 // 2",
        "-1",
        "(0 - 8) ** 0.5",
        "10 ** 99",
        "1 / 0",
        "1e308 * 10",
        "1" * (MAX_LETTERS + 1),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not|longer"):
        evaluated(text)
