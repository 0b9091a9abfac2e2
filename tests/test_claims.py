from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.records import loaded_recipe
from twinrun.claims import Claim, Published, load_published
from twinrun.errors import InputError
from twinrun.manifest import validate

ABSOLUTE, RATIO, INVARIANT = "throughput-1-node", "efficiency-1-to-32-nodes", "same-loss-at-every-world-size"


def table(name: str, **changes: object) -> dict[str, Any]:
    """Return a claim of the recipe as it would be read from a file; None leaves a key out."""
    claim = next(item for item in loaded_recipe().published.claim if item.id == name)
    content = claim.model_dump(mode="json", exclude_none=True) | changes
    return {key: value for key, value in content.items() if value is not None}


def read(name: str, **changes: object) -> Claim:
    return validate(table(name, **changes), Claim, place="published.toml")


@pytest.mark.parametrize("name", [ABSOLUTE, RATIO, INVARIANT])
def test_the_claims_of_the_recipe_are_read_back(name: str) -> None:
    assert read(name).id == name


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (ABSOLUTE, "point"),
        (ABSOLUTE, "hardware"),
        (ABSOLUTE, "formula"),
        (RATIO, "between"),
        (RATIO, "formula"),
    ],
)
def test_what_a_kind_needs_is_named(name: str, key: str) -> None:
    with pytest.raises(InputError, match=rf"claim `{name}` .* also needs: {key}$"):
        raise _first_line(name, key)


def _first_line(name: str, key: str) -> InputError:
    with pytest.raises(InputError) as caught:
        read(name, **{key: None})
    return InputError(caught.value.message)


def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(InputError, match="also needs: point, hardware, formula"):
        read(ABSOLUTE, point=None, hardware=None, formula=None)


def test_tokens_need_no_formula() -> None:
    assert read(ABSOLUTE, metric="tokens-per-second", unit="tokens/s", formula=None).formula is None


@pytest.mark.parametrize(
    ("name", "better"), [(ABSOLUTE, "equal"), (RATIO, "equal"), (INVARIANT, "higher"), (INVARIANT, "lower")]
)
def test_equal_is_for_invariants_and_only_for_them(name: str, better: str) -> None:
    with pytest.raises(InputError, match="`better` is `equal` for invariants"):
        read(name, better=better)


@pytest.mark.parametrize("tolerance", [0, 1, -0.1, 1.5])
def test_a_tolerance_is_a_share(tolerance: float) -> None:
    with pytest.raises(InputError, match=r"published\.toml:tolerance"):
        read(ABSOLUTE, tolerance=tolerance)


@pytest.mark.parametrize("key", ["because", "source", "tolerance", "better", "per", "unit"])
def test_no_claim_without_its_circumstances(key: str) -> None:
    with pytest.raises(InputError, match=f"published.toml:{key}: this key is required"):
        read(ABSOLUTE, **{key: None})


@pytest.mark.parametrize("change", [{"cards": 0}, {"nodes": -1}, {"cards": "4"}])
def test_counts_of_hardware_are_counts(change: dict[str, object]) -> None:
    hardware = table(ABSOLUTE)["hardware"] | change
    with pytest.raises(InputError, match=f"published.toml:hardware.{next(iter(change))}"):
        read(ABSOLUTE, hardware=hardware)


def test_two_claims_of_one_id_are_refused() -> None:
    twice = {"fingerprint": {}, "claim": [table(ABSOLUTE), table(RATIO, id=ABSOLUTE)]}
    with pytest.raises(InputError, match="two claims have the same id"):
        validate(twice, Published, place="published.toml")


def test_the_folder_says_where_the_numbers_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"published\.toml: cannot be read"):
        load_published(tmp_path)
