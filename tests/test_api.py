"""The library's examples, run as they stand in its documentation."""

from __future__ import annotations

import doctest

from twinrun import api


def test_every_function_has_an_example_that_holds() -> None:
    functions = [name for name in api.__all__ if name != "ROOT"]
    found = doctest.DocTestFinder().find(api)
    with_examples = {one.name.rpartition(".")[2] for one in found if one.examples}
    assert with_examples == set(functions)
    assert doctest.testmod(api, optionflags=doctest.ELLIPSIS).failed == 0
