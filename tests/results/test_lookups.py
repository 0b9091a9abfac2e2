"""Points and measurements are found by id: what is looked at does not grow with what there is."""

from __future__ import annotations

import pytest

from twinrun.protocol.measurements import Measurement, Numbers


class Counted(str):
    """An id that counts how often it is compared or hashed."""

    calls = 0

    def __eq__(self, other: object) -> bool:
        Counted.calls += 1
        return str.__eq__(self, str(other))

    def __hash__(self) -> int:
        return str.__hash__(self)


@pytest.mark.parametrize("count", [10, 1000])
def test_a_measurement_is_found_without_looking_at_the_others(count: int) -> None:
    one = {"metric": "time", "unit": "s", "per": "run", "median": 1.0, "low": 1.0, "high": 1.0, "count": 1}
    known = tuple(Measurement.model_validate({"id": f"m{number}", **one}) for number in range(count))
    numbers = Numbers(measurements=known)
    assert numbers.measurement("m3") is known[3]
    Counted.calls = 0
    # The last one, where a search would compare all.
    assert numbers.measurement(Counted(f"m{count - 1}")) is known[-1]
    assert Counted.calls <= 2
    assert numbers.measurement("none") is None
    assert numbers.model_copy(update={"measurements": known[:3]}).measurement("m3") is None
