from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import node_record, paper_record, smoke_record
from twinrun.errors import InputError
from twinrun.record import Record, Spread, read_record, spread, write_record

Address = tuple[str | int, ...]


@pytest.mark.parametrize("made", [smoke_record, node_record, paper_record])
def test_what_is_written_is_read(tmp_path: Path, made: Any) -> None:
    original = made()
    write_record(tmp_path / "record.json", original)
    assert read_record(tmp_path / "record.json") == original.sealed()


def test_a_run_folder_stands_for_its_record(tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", smoke_record())
    assert read_record(tmp_path) == smoke_record().sealed()


def test_writing_again_writes_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    write_record(first, smoke_record())
    write_record(second, read_record(first))
    assert first.read_bytes() == second.read_bytes()


def test_sealing_twice_changes_nothing() -> None:
    once = smoke_record().sealed()
    assert once.sealed() == once
    assert once.digest() == once.sha256


def test_the_seal_does_not_depend_on_an_earlier_one() -> None:
    sealed = smoke_record().sealed()
    assert sealed.model_copy(update={"sha256": "0" * 64}).digest() == sealed.digest()


def test_nothing_else_is_left_in_the_folder(tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", smoke_record())
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_point_is_found_by_name() -> None:
    original = smoke_record()
    assert original.point("devices=2") == original.points[1]
    assert original.point("devices=3") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema_version": 1}', "\ufeff{}"])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "record.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"record\.json"):
        read_record(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent"):
        read_record(tmp_path / "absent.json")


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="schema_version"):
        _read_back(document() | {"schema_version": 2}, tmp_path)


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown key"):
        _read_back(document() | {"comment": "looks right"}, tmp_path)


@given(data=st.data())
def test_a_changed_value_is_refused(data: st.DataObject) -> None:
    content = copy.deepcopy(document())
    address = data.draw(st.sampled_from(list(leaves(content))), label="where")
    _replace(content, address, data.draw(st.sampled_from(_others(_at(content, address))), label="with"))
    with tempfile.TemporaryDirectory() as folder, pytest.raises(InputError):
        _read_back(content, Path(folder))


@given(data=st.data())
def test_a_flipped_bit_is_refused_or_changes_nothing(data: st.DataObject) -> None:
    content = bytearray(json.dumps(document()).encode())
    place = data.draw(st.integers(min_value=0, max_value=len(content) - 1), label="byte")
    content[place] ^= 1 << data.draw(st.integers(min_value=0, max_value=7), label="bit")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        file.write_bytes(bytes(content))
        try:
            found = read_record(file)
        except InputError:
            return
    assert found == node_record()


@given(values=st.lists(st.floats(min_value=1e-3, max_value=1e6), min_size=1, max_size=20))
def test_a_spread_holds_its_median_between_its_ends(values: list[float]) -> None:
    found = spread(values, unit="s", per="run")
    assert found.low <= found.median <= found.high
    assert found.count == len(values)


@pytest.mark.parametrize("factor", [2.0, -2.0])
def test_a_scaled_spread_keeps_its_ends_in_order(factor: float) -> None:
    found = spread([1.0, 2.0, 4.0], unit="s", per="run").scaled(factor, unit="ms", per="device")
    ends = sorted((factor, 4 * factor))
    assert found == Spread(median=2 * factor, low=ends[0], high=ends[1], count=3, unit="ms", per="device")


@cache
def document() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(node_record().sealed().model_dump_json())
    assert Record.model_validate_json(json.dumps(content)).sha256 == content["sha256"]
    return content


def leaves(value: Any, address: Address = ()) -> Iterator[Address]:
    """Yield where each single value stands; an empty list or table counts as one."""
    inner = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    if not inner:
        yield address
    for key, item in inner:
        yield from leaves(item, (*address, key))


def _others(value: Any) -> list[Any]:
    """Return values that are not `value`, most of its own type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1, -value - 1, value * 2 + 3, str(value), None]
    if isinstance(value, str):
        return [value + " ", value + "x", "", None] if value else [" ", None]
    return ["x", 1]


def _at(content: Any, address: Address) -> Any:
    for key in address:
        content = content[key]
    return content


def _replace(content: Any, address: Address, value: Any) -> None:
    _at(content, address[:-1])[address[-1]] = value


def _read_back(content: dict[str, Any], folder: Path) -> Record:
    file = folder / "record.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return read_record(file)
