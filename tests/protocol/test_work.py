"""What a pass has to do, counted a second time beside the formulas that publications use."""

from __future__ import annotations

import pytest

from twinrun.protocol.models import ModelShape, members


@pytest.mark.parametrize("shape", members().values(), ids=members().keys())
def test_parameters_are_those_of_the_shape(shape: ModelShape) -> None:
    assert shape.work().parameters == shape.parameters()
